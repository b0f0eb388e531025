"""The selective scan on the CPU kernel (README 7): the same bodies as in `schema`."""

import torch
from torch import Tensor

from anymamba.ops.native import check_storage, new_tensor, run_kernel

__all__ = ["backward", "forward", "refusal"]

_Constants = tuple[bool, bool, int | None, Tensor | None, Tensor | None, Tensor | None]


def refusal(
    u_bsi: Tensor,
    dt_bsi: Tensor,
    a_ir: Tensor,
    b: Tensor,
    c: Tensor,
    initial_bir: Tensor,
    skip_i: Tensor,
    z_bsi: Tensor,
) -> str | None:
    """Say why the kernel cannot serve these tensors; None when it can."""
    return check_storage(
        u=u_bsi, dt=dt_bsi, a=a_ir, b=b, c=c, initial=initial_bir, skip=skip_i, z=z_bsi
    )


def forward(
    u_bsi: Tensor,
    dt_bsi: Tensor,
    a_ir: Tensor,
    b: Tensor,
    c: Tensor,
    initial_bir: Tensor,
    skip_i: Tensor,
    z_bsi: Tensor,
    *constants: object,
) -> tuple[Tensor, Tensor]:
    """Run the scan; the kernel cuts chunks of its own, so the constant `chunk_len` has no effect.

    Returns:
        The outputs, in the dtype of u, and the final states, in float32.
    """
    tensors = (u_bsi, dt_bsi, a_ir, b, c, initial_bir, skip_i, z_bsi)
    y_bsi = new_tensor(u_bsi, u_bsi.shape)
    final_bir = new_tensor(initial_bir, initial_bir.shape, torch.float32)
    run_kernel("scan_forward", (*_inputs(tensors, constants), y_bsi, final_bir), _sizes(tensors))
    return y_bsi, final_bir


def backward(
    grad_y_bsi: Tensor,
    grad_final_bir: Tensor,
    u_bsi: Tensor,
    dt_bsi: Tensor,
    a_ir: Tensor,
    b: Tensor,
    c: Tensor,
    initial_bir: Tensor,
    skip_i: Tensor,
    z_bsi: Tensor,
    *constants: object,
) -> tuple[Tensor, ...]:
    """Differentiate the scan from its inputs alone; nothing of the forward is kept."""
    tensors = (u_bsi, dt_bsi, a_ir, b, c, initial_bir, skip_i, z_bsi)
    grads = tuple(new_tensor(tensor, tensor.shape) for tensor in tensors)
    given = (grad_y_bsi.contiguous(), grad_final_bir.contiguous())
    wanted = (grad if grad.numel() else None for grad in grads)
    run_kernel("scan_backward", (*given, *_inputs(tensors, constants), *wanted), _sizes(tensors))
    return grads


def _inputs(
    tensors: tuple[Tensor, ...], constants: tuple[object, ...]
) -> tuple[Tensor | None, ...]:
    # The kernel reads the last axis number by number; every other axis may have any stride.
    by_rows = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
    cu_seqlens = constants[3]
    borders = cu_seqlens.to(torch.int64) if isinstance(cu_seqlens, Tensor) else None
    return (*(x if x.numel() else None for x in by_rows), borders)


def _sizes(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    u_bsi, _, a_ir, b, c, initial_bir = tensors[:6]
    groups = next((x.shape[2] for x in (b, c) if x.dim() == 4), 1)
    rows = (groups, initial_bir.shape[0])
    return (*u_bsi.shape, a_ir.shape[1], *rows, int(b.dim() == 2), int(c.dim() == 2))
