"""Step sizes on the CPU kernel (README 6): the bodies of `portable`."""

import torch
from torch import Tensor

from anymamba.ops.native import check_storage, new_tensor, run_kernel
from anymamba.ops.norm.native import by_rows

__all__ = ["backward", "forward", "refusal"]


def refusal(x_sv: Tensor, bias_v: Tensor) -> str | None:
    """Say why the kernel cannot serve these tensors; None when it can."""
    return check_storage(x=x_sv, bias=bias_v)


def forward(x_sv: Tensor, bias_v: Tensor) -> tuple[Tensor]:
    """Compute the step sizes of rows."""
    dt_sv = new_tensor(x_sv, x_sv.shape, torch.float32)
    run_kernel("step_size_forward", (by_rows(x_sv), bias_v, dt_sv), x_sv.shape)
    return (dt_sv,)


def backward(grad_sv: Tensor, x_sv: Tensor, bias_v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and bias from the inputs alone."""
    grads = new_tensor(x_sv, x_sv.shape), bias_v.new_empty(bias_v.shape)
    above_sv = by_rows(grad_sv.to(torch.float32))
    run_kernel("step_size_backward", (above_sv, by_rows(x_sv), bias_v, *grads), x_sv.shape)
    return grads
