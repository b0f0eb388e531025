"""Safetensors files: read and written by the library, written whole or not at all."""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from anymamba.errors import CheckpointError
from anymamba.io.disk import replacing_path

__all__ = ["DTYPES", "INTEGERS", "bytes_of", "read_safetensors", "write_safetensors"]

# What weights and states may be stored as; states also count tokens, in int64.
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# What the values of quantised weights are stored as.
INTEGERS = (torch.int8, torch.uint8)


def bytes_of(tensor: Tensor) -> bytearray:
    """Return a copy of the values in row-major order, whatever the strides and the device."""
    data = bytearray(tensor.numel() * tensor.element_size())
    if data:
        torch.frombuffer(data, dtype=tensor.dtype).copy_(tensor.detach().flatten())
    return data


def write_safetensors(
    where: str,
    file: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Write tensors and text entries; a crash leaves an older file as it was.

    The library writes tensors from where they lie (before its version 0.8, from a copy of them
    all): memory is needed for those that another dtype, device or layout makes copies of.

    Args:
        where: the function that asks; opens every message.
        file: where to write; the folder must exist.
        tensors: what to store, by name; views and shared memory are stored by value.
        metadata: text entries of the header.
        dtypes: what to store each tensor as; as it is when omitted.

    Raises:
        CheckpointError: the folder is missing, the system refuses, or safetensors is not there.
    """
    try:
        importlib.import_module("numpy")  # the library's writer needs it, and imports it late
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise CheckpointError(
            f"{where}: the packages safetensors and numpy must be installed; {error}. "
            "Install them: pip install 'anymamba[io]'."
        ) from error
    if not file.parent.is_dir():
        raise CheckpointError(
            f"{where}: the folder {str(file.parent)!r} must exist; it does not. "
            "Create it, or choose another place."
        )
    values = {}
    for name, tensor in tensors.items():
        kind = tensor.dtype if dtypes is None else dtypes[name]
        value = tensor.detach().to(device="cpu", dtype=kind).contiguous()
        # The library refuses tensors that share memory; a view must not drag its base along.
        is_alone = value.untyped_storage().nbytes() == value.nbytes
        shared = any(value.data_ptr() == other.data_ptr() for other in values.values())
        values[name] = value if is_alone and not shared else value.clone()
    with replacing_path(where, file) as temporary:
        try:
            save_file(values, os.path.abspath(temporary), metadata=dict(metadata))
        except SafetensorError as error:
            # A full disk has this name there.
            raise OSError(str(error)) from error


def read_safetensors(where: str, file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file, copied to the CPU, and the text entries of its header.

    Args:
        where: the function that asks; opens every message.
        file: what to read; it may be replaced or removed afterwards.

    Raises:
        CheckpointError: the file is missing or damaged, or safetensors is not there.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(
            f"{where}: the package safetensors must be installed; {error}. "
            "Install it: pip install 'anymamba[io]'."
        ) from error
    try:
        with safe_open(os.fspath(file), framework="pt", device="cpu") as reader:
            # The library maps the file into memory: copy, or a later writer changes our values.
            tensors = {name: reader.get_tensor(name).clone() for name in reader.keys()}  # noqa: SIM118
            return tensors, dict(reader.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{where}: {str(file)!r} must be a whole safetensors file; {error}. "
            "Use a copy of the original."
        ) from error
