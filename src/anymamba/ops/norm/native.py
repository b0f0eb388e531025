"""The norms on the CPU kernels (README 6): the same bodies as in `blocked`."""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from anymamba.ops.native import check_storage, run_kernel

__all__ = [
    "add_backward",
    "add_forward",
    "backward",
    "by_rows",
    "forward",
    "real_bits",
    "refusal",
]


def refusal(x_sv: Tensor, weight_v: Tensor) -> str | None:
    """Say why the kernel cannot serve these tensors; None when it can."""
    return check_storage(x=x_sv, weight=weight_v)


def forward(x_sv: Tensor, weight_v: Tensor, eps: float, group_size: int) -> tuple[Tensor]:
    """Normalise rows in groups."""
    y_sv = x_sv.new_empty(x_sv.shape)
    tensors = (by_rows(x_sv), None, weight_v, y_sv, None)
    run_kernel("norm_forward", tensors, (*x_sv.shape, group_size, real_bits(eps)))
    return (y_sv,)


def backward(
    grad_y_sv: Tensor, x_sv: Tensor, weight_v: Tensor, eps: float, group_size: int
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and weight from the inputs alone."""
    grad_x_sv, grad_weight_v = x_sv.new_empty(x_sv.shape), weight_v.new_empty(weight_v.shape)
    given = (by_rows(grad_y_sv), None, by_rows(x_sv), None, weight_v)
    sizes = (*x_sv.shape, group_size, real_bits(eps))
    run_kernel("norm_backward", (*given, grad_x_sv, None, grad_weight_v), sizes)
    return grad_x_sv, grad_weight_v


def add_forward(
    x_sv: Tensor, residual_sv: Tensor, weight_v: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the norm of a sum, and the sum in the given dtype."""
    y_sv, stream_sv = x_sv.new_empty(x_sv.shape), x_sv.new_empty(x_sv.shape, dtype=dtype)
    tensors = (by_rows(x_sv), by_rows(residual_sv), weight_v, y_sv, stream_sv)
    run_kernel("norm_forward", tensors, (*x_sv.shape, x_sv.shape[1], real_bits(eps)))
    return y_sv, stream_sv


def add_backward(
    grad_y_sv: Tensor,
    grad_stream_sv: Tensor | None,
    terms: Sequence[Tensor],
    weight_v: Tensor,
    eps: float,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of x, residual and weight.

    Args:
        grad_y_sv: gradient of the norm.
        grad_stream_sv: gradient of the sum; None means zero.
        terms: both terms of the sum, or the sum itself.
        weight_v: of the norm.
        eps: of the norm.
        dtypes: of x and of the residual; if they are equal, both have one gradient.
    """
    x_sv, *more = (by_rows(term) for term in terms)
    grad_x_sv = x_sv.new_empty(x_sv.shape, dtype=dtypes[0])
    grad_weight_v = weight_v.new_empty(weight_v.shape)
    same = dtypes[0] == dtypes[1]
    grad_residual_sv = grad_x_sv if same else x_sv.new_empty(x_sv.shape, dtype=dtypes[1])
    passed = None if grad_stream_sv is None else by_rows(grad_stream_sv)
    given = (by_rows(grad_y_sv), passed, x_sv, more[0] if more else None, weight_v)
    wanted = (grad_x_sv, None if same else grad_residual_sv, grad_weight_v)
    run_kernel("norm_backward", (*given, *wanted), (*x_sv.shape, x_sv.shape[1], real_bits(eps)))
    return grad_x_sv, grad_residual_sv, grad_weight_v


def by_rows(x: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous: itself where that holds."""
    return x if x.stride(-1) == 1 else x.contiguous()


def real_bits(value: float) -> int:
    """Return the bits of a double, in which real numbers reach a kernel."""
    return struct.unpack("q", struct.pack("d", value))[0]
