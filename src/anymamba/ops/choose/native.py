"""The call of the kernel that chooses tokens: an id and the largest logit of every row."""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.ops.checks import check_option
from anymamba.ops.native import (
    AXES,
    DTYPES,
    KernelCall,
    kernel_in_force,
    kernel_threads,
    native_status,
)
from anymamba.settings import Settings, current

__all__ = ["Chosen", "TokenChooser", "choosing_refusal"]

_VIEW = 2 + AXES  # numbers of a view: data, dtype, strides
_OPTIONS = 7  # sizes and options in front of the rows' numbers


class Chosen(NamedTuple):
    """A token for each row, and the row's largest logit; NaN counts as the largest."""

    ids: list[int]
    best: list[float]


def choosing_refusal(logits_bw: Tensor) -> str | None:
    """Say why the kernel cannot choose from these logits; None when it can."""
    if type(logits_bw) is not Tensor or not logits_bw.is_cpu:
        return "the compiled kernel reads plain tensors on the CPU"
    if logits_bw.dtype is not torch.float32 or logits_bw.stride(-1) != 1:
        return "the compiled kernel reads float32 whose rows are contiguous"
    return native_status().why_not


class TokenChooser:
    """Chooses a token per row: the likeliest, or a draw after temperature, top-k, top-p and min-p.

    It keeps what a call needs, because after a token everything costs: for one thread at a time.

    Args:
        is_greedy: take the likeliest, the first of equal ones, and ignore the rest.
        temperature: at least 1e-7; divides the logits.
        top_k: keep this many likeliest tokens, and those that tie with the last; 0 means all.
        top_p: keep the likeliest tokens until their mass reaches this; 1 means all.
        min_p: keep tokens at least this likely, relative to the likeliest; 0 means all.

    Example:
        >>> chooser = TokenChooser(is_greedy=True)
        >>> logits_bw = torch.tensor([[0.0, 2.0, 1.0]])
        >>> chosen = chooser.choose(logits_bw, [0.5])
        >>> chosen in (None, Chosen(ids=[1], best=[2.0]))  # None without compiled kernels
        True
    """

    def __init__(
        self,
        *,
        is_greedy: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> None:
        """Check the options and write them down."""
        where = "TokenChooser"
        check_option(
            where, 1e-7 <= temperature <= 1e30, "temperature", "from 1e-7 to 1e30", temperature
        )
        check_option(where, top_k >= 0, "top_k", "0 (all tokens) or more", top_k)
        check_option(where, 0 < top_p <= 1, "top_p", "above 0 and at most 1 (all tokens)", top_p)
        check_option(where, 0 <= min_p <= 1, "min_p", "between 0 (all tokens) and 1", min_p)
        self._flags = is_greedy, top_k
        self._reals = temperature, top_p, min_p
        self._bound: _Bound | None = None
        self._last: Tensor | None = None
        self._how: tuple[int, Settings] | None = None
        self._size = 0

    def choose(self, logits_bw: Tensor, numbers: Sequence[float]) -> Chosen | None:
        """Choose; None where `choosing_refusal` refuses the logits.

        Args:
            logits_bw: (rows, vocabulary). A tensor that is given again may hold other values and
                sizes; that its dtype or its strides are others is not noticed.
            numbers: one per row, from 0 to less than 1; a draw depends on it and nothing else.

        Returns:
            The ids and the largest logits; an id means nothing where that is not finite.
        """
        # One row needs no threads, and asking for them takes time.
        threads = 1 if len(numbers) == 1 else min(len(numbers), kernel_threads())
        how = threads, current()
        # So does asking a tensor what it is: one that comes again is only asked for its size.
        if logits_bw is not self._last or how != self._how or logits_bw.numel() != self._size:
            layout = logits_bw.shape, logits_bw.stride(-1), logits_bw.dtype, logits_bw.is_cpu
            key = *layout, type(logits_bw), how
            if self._bound is None or self._bound.key != key:
                if choosing_refusal(logits_bw) is not None:
                    return None
                # Forgotten first: an interrupt must not leave a tensor with another's call.
                self._last = None
                self._bound = _Bound(key, logits_bw.shape, threads, self._flags, self._reals)
            self._last, self._how, self._size = logits_bw, how, logits_bw.numel()
        assert self._bound is not None
        return self._bound.run(logits_bw, numbers)


class _Bound:
    """A call for logits of one kind: options, results and workspace at their places."""

    def __init__(
        self,
        key: tuple[Any, ...],
        shape: torch.Size,
        threads: int,
        flags: tuple[bool, int],
        reals: tuple[float, float, float],
    ) -> None:
        self.key = key
        (rows, width), (is_greedy, top_k) = shape, flags
        self._function, variant = kernel_in_force("choose")
        self._numbers = struct.Struct(f"{rows}d")
        bits = struct.unpack("3q", struct.pack("3d", *reals))
        self._sizes = (ctypes.c_int64 * (_OPTIONS + rows))(
            rows, width, is_greedy, min(top_k, width), *bits
        )
        self._ids, self._best = (ctypes.c_int64 * rows)(), (ctypes.c_float * rows)()
        self._views = (ctypes.c_int64 * (3 * _VIEW))()
        self._views[:2] = 0, DTYPES[torch.float32]
        self._views[_VIEW : _VIEW + 2] = ctypes.addressof(self._ids), DTYPES[torch.int64]
        best = ctypes.addressof(self._best), DTYPES[torch.float32]
        self._views[2 * _VIEW : 2 * _VIEW + 2] = best
        views, sizes = ctypes.addressof(self._views), ctypes.addressof(self._sizes)
        self._call = KernelCall(views, sizes, None, threads, variant)
        wanted = self._function(ctypes.byref(self._call))
        self._workspace = torch.empty(wanted, dtype=torch.uint8, device="cpu")
        self._call.workspace = self._workspace.data_ptr()

    def run(self, logits_bw: Tensor, numbers: Sequence[float]) -> Chosen:
        self._views[0], self._views[2] = logits_bw.data_ptr(), logits_bw.stride(0)
        self._numbers.pack_into(self._sizes, 8 * _OPTIONS, *numbers)
        self._function(ctypes.byref(self._call))
        return Chosen(self._ids[:], self._best[:])
