"""The operators `anymamba::ssd_core_fwd` and `anymamba::ssd_core_bwd`."""

from typing import Any

import torch
from torch import Tensor

from anymamba.ops.boundary import Operator
from anymamba.ops.native import Kernel
from anymamba.ops.numerics import accumulate_dtype
from anymamba.ops.ssd import native
from anymamba.ops.ssd.recalculated import core_backward, core_forward
from anymamba.ops.ssd.serial import ssd_core_serial

__all__ = ["SSD_CORE"]


def _fake(v_bsmhp: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    initial_bhpr = args[3]
    final_bhpr = torch.empty(
        initial_bhpr.shape, dtype=accumulate_dtype(v_bsmhp.dtype), device=v_bsmhp.device
    )
    return torch.empty(v_bsmhp.shape, dtype=v_bsmhp.dtype, device=v_bsmhp.device), final_bhpr


def _merge_axes(chunk_len: int, cu_seqlens: Tensor | None) -> tuple[list[int], list[int]]:
    # Mapped copies become more rows, or, in a pack, more sequences of the one row.
    token = 0 if cu_seqlens is None else 1
    return [token] * 4 + [0] + [token] * 2, [token, 0]


def _merge_constants(
    size: int, tensors: list[Tensor], constants: tuple[Any, ...]
) -> tuple[Any, ...]:
    chunk_len, cu_seqlens = constants
    if cu_seqlens is None:
        return constants
    return chunk_len, repeat_borders(cu_seqlens, size)


def repeat_borders(cu_seqlens: Tensor, times: int) -> Tensor:
    """Return the borders of a pack laid end to end `times` times."""
    shift = torch.arange(times, device=cu_seqlens.device)[:, None] * cu_seqlens[-1]
    return torch.cat([cu_seqlens[:1], (shift + cu_seqlens[1:]).flatten()])


SSD_CORE = Operator(
    "ssd_core",
    tensors=("v", "da", "b", "c", "initial", "scale", "own"),
    constants="int chunk_len, Tensor? cu_seqlens",
    outputs=2,
    forward=core_forward,
    backward=core_backward,
    fake=_fake,
    composite=ssd_core_serial,
    merge_axes=_merge_axes,
    merge_constants=_merge_constants,
    native=Kernel(native.refusal, native.forward, native.backward),
)
