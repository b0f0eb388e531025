"""What the tensors of a cache must be."""

from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.errors import CacheError
from anymamba.ops import accumulate_dtype

__all__ = ["StateSpec", "check_state"]


class StateSpec(NamedTuple):
    """What one tensor of a cache must be; its first axis, the batch, is left out."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def check_state(
    where: str, name: str, tensor: Tensor, count: int, wanted: StateSpec, device: torch.device
) -> None:
    """Raise `CacheError` if one tensor of a cache does not fit the block and its input."""
    if tensor.shape != (count, *wanted.shape):
        raise CacheError(
            f"{where}: {name} of the cache must have shape {(count, *wanted.shape)}; "
            f"got {tuple(tensor.shape)}. The first axis is the batch, or the packed sequences."
        )
    if tensor.device != device:
        raise CacheError(
            f"{where}: {name} of the cache is on {tensor.device}, the input on {device}. "
            f"Move it with cache.to({str(device)!r})."
        )
    if not tensor.is_floating_point() or accumulate_dtype(tensor.dtype) != accumulate_dtype(
        wanted.dtype
    ):
        raise CacheError(
            f"{where}: {name} of the cache must be {wanted.dtype}; got {tensor.dtype}. "
            "Cast it with cache.to(dtype=...)."
        )
