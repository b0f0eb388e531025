"""The convolution on the CPU kernel (README 7): the same bodies as in `schema`."""

import torch
from torch import Tensor

from anymamba.ops.native import check_storage, new_tensor, run_kernel

__all__ = ["backward", "forward", "refusal"]


def refusal(x_bsv: Tensor, window_bvk: Tensor, weight_vk: Tensor, bias_v: Tensor) -> str | None:
    """Say why the kernel cannot serve these tensors; None when it can."""
    return check_storage(x=x_bsv, window=window_bvk, weight=weight_vk, bias=bias_v)


def forward(
    x_bsv: Tensor,
    window_bvk: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the outputs and the last windows."""
    inputs = _inputs(x_bsv, window_bvk, weight_vk, bias_v, cu_seqlens)
    y_bsv, last_bvk = new_tensor(x_bsv, x_bsv.shape), window_bvk.new_empty(window_bvk.shape)
    run_kernel("conv_forward", (*inputs, y_bsv, last_bvk), _sizes(x_bsv, window_bvk, silu))
    return y_bsv, last_bvk


def backward(
    grad_y_bsv: Tensor,
    grad_last_bvk: Tensor,
    x_bsv: Tensor,
    window_bvk: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> tuple[Tensor, ...]:
    """Compute the gradients of x, window, weight and bias from the inputs alone."""
    tensors = (x_bsv, window_bvk, weight_vk, bias_v)
    grads = tuple(tensor.new_empty(tensor.shape) for tensor in tensors)
    given = (grad_y_bsv.contiguous(), grad_last_bvk.contiguous())
    inputs = _inputs(*tensors, cu_seqlens)
    run_kernel("conv_backward", (*given, *inputs, *grads), _sizes(x_bsv, window_bvk, silu))
    return grads


def _inputs(
    x_bsv: Tensor,
    window_bvk: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor | None, ...]:
    # The kernel reads channels, and the columns of windows and filters, one after the other.
    tensors = (x_bsv, window_bvk, weight_vk)
    by_rows = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
    return (*by_rows, bias_v, None if cu_seqlens is None else cu_seqlens.to(torch.int64))


def _sizes(x_bsv: Tensor, window_bvk: Tensor, silu: bool) -> tuple[int, ...]:
    return (*x_bsv.shape, window_bvk.shape[2], window_bvk.shape[0], int(silu))
