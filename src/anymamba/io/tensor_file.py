"""Writing safetensors files: without NumPy, whole or not at all.

The library's own writer is not used because it needs NumPy, and because the function below it
changed its signature between releases. The format is short: the length of the header in 8 bytes,
the header (JSON: text entries; dtype, shape and place of each tensor), the values. Reading, where a
file cannot be trusted, is left to the library.
"""

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anymamba.errors import CheckpointError

__all__ = ["CODES", "bytes_of", "encode", "write_atomically"]

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
# States also count tokens; weights do not.
_ALL_CODES = CODES | {torch.int64: "I64"}


def bytes_of(tensor: Tensor) -> bytearray:
    """Return a copy of the values in row-major order, whatever the strides and the device."""
    data = bytearray(tensor.numel() * tensor.element_size())
    if data:
        torch.frombuffer(data, dtype=tensor.dtype).copy_(tensor.detach().flatten())
    return data


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[bytes | bytearray]:
    """Return the parts of a safetensors file: length of the header, header, values.

    Args:
        tensors: what to store, by name; dtypes of `CODES`, or int64.
        metadata: text entries of the header.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    parts, end = [], 0
    # Wide types first: then each tensor starts at a multiple of its element size.
    for name, tensor in sorted(tensors.items(), key=lambda x: (-x[1].element_size(), x[0])):
        parts.append(bytes_of(tensor))
        begin, end = end, end + len(parts[-1])
        header[name] = {
            "dtype": _ALL_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *parts]


def write_atomically(
    where: str, file: str | os.PathLike[str], parts: Sequence[bytes | bytearray]
) -> None:
    """Write a file under another name and rename it when it is whole.

    A crash leaves an older file as it was, at worst with a hidden `.part` file beside it. Links are
    followed and permissions kept.

    Args:
        where: the function that asks; opens every message.
        file: where to write; the folder must exist.
        parts: the content, in order.

    Raises:
        CheckpointError: the folder is missing, or the system refuses.
    """
    target = Path(os.path.realpath(file))
    if not target.parent.is_dir():
        raise CheckpointError(
            f"{where}: the folder {str(target.parent)!r} must exist; it does not. "
            "Create it, or choose another place."
        )
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    try:
        with open(temporary, "xb") as stream:
            if target.exists():
                shutil.copymode(target, temporary)
            for part in parts:
                stream.write(part)
            stream.flush()
            # Without this a power cut could keep the new name and lose the bytes behind it.
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise CheckpointError(
            f"{where}: {str(target)!r} must be writable; {error}. "
            "Nothing was changed: choose another place, or make room."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
