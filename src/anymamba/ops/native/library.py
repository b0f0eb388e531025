"""The compiled library: where it lies, whether it may be used, which instruction sets it runs."""

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from anymamba import settings

__all__ = ["Library", "NativeStatus", "load", "native_status"]

# The interface of native/anymamba.h that this code speaks.
_ABI = 7
_FILE = "_native.so"


class Library(NamedTuple):
    """A library that is loaded and may be used."""

    handle: ctypes.CDLL
    file: Path
    threading: str
    variants: dict[str, int]  # instruction sets that run here, slowest first


class NativeStatus(NamedTuple):
    """What the CPU kernels are at this moment.

    Attributes:
        variant: the instruction set in force; None when the kernels are not used.
        available: every instruction set that is built and that this machine has.
        threading: how the kernels run in parallel: "openmp" or "threads".
        why_not: why the kernels are not used; None when they are.
    """

    variant: str | None
    available: tuple[str, ...]
    threading: str | None
    why_not: str | None


def native_status() -> NativeStatus:
    """Say whether the CPU kernels are in use, on which instruction set, or why not.

    Example:
        >>> with settings.override(native="off"):
        ...     native_status().why_not
        'the setting native=off (ANYMAMBA_NATIVE) turns the CPU kernels off'
    """
    choice, file = settings.current().native, settings.current().native_library
    found = load(file)
    off = "the setting native=off (ANYMAMBA_NATIVE) turns the CPU kernels off"
    if isinstance(found, str):
        return NativeStatus(None, (), None, off if choice == "off" else found)
    available, threading = tuple(found.variants), found.threading
    if choice == "off":
        return NativeStatus(None, available, threading, off)
    if choice != "auto" and choice not in available:
        why_not = (
            f"the setting native={choice} (ANYMAMBA_NATIVE) names an instruction set that this "
            f"machine or build does not have; it has {', '.join(available)}"
        )
        return NativeStatus(None, available, threading, why_not)
    variant = available[-1] if choice == "auto" else choice
    return NativeStatus(variant, available, threading, None)


@functools.cache
def load(file: str | None) -> Library | str:
    """Load the library at `file`, or the one of this package; return it, or why it is not used."""
    path = _find() if file is None else Path(file)
    if path is None:
        return (
            "this installation has no compiled kernels: there was no C++ compiler when it was "
            "installed; install one and run pip install again"
        )
    try:
        handle = ctypes.CDLL(os.fspath(path))
        _declare(handle)
    except (OSError, AttributeError) as error:
        return f"the compiled kernels cannot be loaded: {error}"
    if (abi := handle.anymamba_abi()) != _ABI:
        return f"the compiled kernels speak interface {abi}, this package {_ABI}; install it again"
    threading = handle.anymamba_threading().decode()
    if threading == "openmp" and not _shares_openmp(handle):
        return (
            "the compiled kernels would bring a second OpenMP runtime beside torch's, and two "
            "pools of threads cost more than the kernels save"
        )
    return Library(handle, path, threading, _variants(handle))


def _find() -> Path | None:
    # An editable install has two places: the sources, and where the build put the library.
    package = sys.modules[__name__.partition(".")[0]]
    places = [Path(place) / _FILE for place in package.__path__]
    return next((place for place in places if place.is_file()), None)


def _declare(handle: ctypes.CDLL) -> None:
    handle.anymamba_abi.restype = ctypes.c_int64
    handle.anymamba_threading.restype = ctypes.c_char_p
    handle.anymamba_variant_name.restype = ctypes.c_char_p
    handle.anymamba_variant_name.argtypes = [ctypes.c_int64]
    handle.anymamba_variant_runs_here.restype = ctypes.c_int64
    handle.anymamba_variant_runs_here.argtypes = [ctypes.c_int64]


def _variants(handle: ctypes.CDLL) -> dict[str, int]:
    variants, place = {}, 0
    while name := handle.anymamba_variant_name(place):
        if handle.anymamba_variant_runs_here(place):
            variants[name.decode()] = place
        place += 1
    return variants


def _shares_openmp(handle: ctypes.CDLL) -> bool:
    """Say whether a symbol of OpenMP is the same function for the kernels and for torch.

    Other packages may have mapped an OpenMP runtime of their own; that is theirs to pay for. What
    counts is that the kernels and torch wake the same pool.
    """
    symbol = "omp_get_max_threads"
    torchs = ctypes.CDLL(torch._C.__file__, mode=ctypes.DEFAULT_MODE)
    if not hasattr(torchs, symbol):
        return True  # torch was built on another kind of threads: there is only one OpenMP
    addresses = {
        ctypes.cast(getattr(one, symbol), ctypes.c_void_p).value for one in (handle, torchs)
    }
    return len(addresses) == 1
