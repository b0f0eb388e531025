"""Writing safetensors files: by the library, whole or not at all."""

import importlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from anymamba.errors import CheckpointError
from anymamba.io.disk import replacing

__all__ = ["DTYPES", "bytes_of", "write_safetensors"]

# What weights and states may be stored as; states also count tokens, in int64.
_PIECE = 1 << 20
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


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
        from safetensors.torch import save
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
    content = memoryview(save(values, metadata=dict(metadata)))
    with replacing(where, file) as stream:
        for start in range(0, len(content), _PIECE):
            stream.write(content[start : start + _PIECE])
