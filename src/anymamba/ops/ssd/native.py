"""The SSD core on the CPU kernel (README section 7): the same bodies as `recalculated`."""

import torch
from torch import Tensor

from anymamba.ops.native import check_storage, new_tensor, run_kernel
from anymamba.ops.ssd.adjoint import CoreGradients

__all__ = ["backward", "forward", "refusal"]


def refusal(
    v_bsmhp: Tensor,
    da_bsh: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    initial_bhpr: Tensor,
    scale_bsh: Tensor,
    own_bsh: Tensor,
) -> str | None:
    """Say why the kernel cannot serve these tensors; None when it can."""
    return check_storage(
        v=v_bsmhp,
        da=da_bsh,
        b=b_bsmgr,
        c=c_bsmgr,
        initial=initial_bhpr,
        scale=scale_bsh,
        own=own_bsh,
    )


def forward(
    v_bsmhp: Tensor,
    da_bsh: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    initial_bhpr: Tensor,
    scale_bsh: Tensor,
    own_bsh: Tensor,
    chunk_len: int,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the scan; the kernel cuts chunks of its own, so `chunk_len` has no effect.

    Returns:
        The outputs, in the dtype of v, and the final states, in float32.
    """
    y_bsmhp = new_tensor(v_bsmhp, v_bsmhp.shape)
    final_bhpr = new_tensor(initial_bhpr, initial_bhpr.shape, torch.float32)
    inputs = _inputs(v_bsmhp, da_bsh, b_bsmgr, c_bsmgr, initial_bhpr, scale_bsh, own_bsh)
    run_kernel(
        "ssd_forward",
        [*inputs, _borders(cu_seqlens), y_bsmhp, final_bhpr],
        _sizes(v_bsmhp, b_bsmgr, cu_seqlens),
    )
    return y_bsmhp, final_bhpr


def backward(
    grad_y_bsmhp: Tensor,
    grad_final_bhpr: Tensor,
    v_bsmhp: Tensor,
    da_bsh: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    initial_bhpr: Tensor,
    scale_bsh: Tensor,
    own_bsh: Tensor,
    chunk_len: int,
    cu_seqlens: Tensor | None,
) -> CoreGradients:
    """Differentiate the scan from its inputs alone; nothing of the forward is kept."""
    inputs = (v_bsmhp, da_bsh, b_bsmgr, c_bsmgr, initial_bhpr, scale_bsh, own_bsh)
    grads = CoreGradients(*(new_tensor(x, x.shape) for x in inputs))
    run_kernel(
        "ssd_backward",
        [
            _by_rows(grad_y_bsmhp),
            grad_final_bhpr,
            *_inputs(*inputs),
            _borders(cu_seqlens),
            *grads,
        ],
        _sizes(v_bsmhp, b_bsmgr, cu_seqlens),
    )
    return grads


def _inputs(v: Tensor, da: Tensor, b: Tensor, c: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    return _by_rows(v), da, _by_rows(b), _by_rows(c), *others


def _by_rows(rows: Tensor) -> Tensor:
    # The kernel reads rows along their last axis. Every other axis, and all axes of decays, weights
    # and states, may have any stride: an absent weight is one expanded number.
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _borders(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous()


def _sizes(v_bsmhp: Tensor, b_bsmgr: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    packed = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    return (*v_bsmhp.shape, *b_bsmgr.shape[3:], packed)
