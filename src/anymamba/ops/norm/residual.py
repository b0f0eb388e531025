"""Residual sum and norm in one kernel (README 3): the sum is written once and kept for backward.

An `Operator` would keep both terms of the sum, one tensor more per norm than the sum alone; so this
is a Function of its own. Compilers and function transforms see the sum and the norm apart.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from anymamba.errors import BackendError
from anymamba.ops.boundary import refuse_forward_mode
from anymamba.ops.checks import guard
from anymamba.ops.norm import native
from anymamba.ops.norm.blocked import norm, plain_norm
from anymamba.ops.numerics import accumulate_dtype

__all__ = ["add", "add_norm"]


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, in_fp32: bool, kernel: str
) -> tuple[Tensor, Tensor]:
    """Return the norm of `x + residual` in the dtype of x, and the sum as it is stored."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if residual is None or kernel == "portable" or traced:
        total, stored = add(x, residual, in_fp32)
        return norm(total, weight, eps, x.shape[-1], kernel).to(x.dtype), stored
    rows = (x.reshape(-1, x.shape[-1]), residual.reshape(-1, x.shape[-1]))
    wide = in_fp32 or residual.dtype == torch.float32
    results: Any = _AddNorm.apply(*rows, weight, eps, wide, kernel)
    y_sv, stream_sv = results
    return y_sv.view(x.shape), stream_sv.view(x.shape)


def add(x: Tensor, residual: Tensor | None, in_fp32: bool) -> tuple[Tensor, Tensor]:
    """Return the sum in the dtype to compute in, and as it is stored."""
    compute = accumulate_dtype(x.dtype)
    total = x.to(compute)
    if residual is not None:
        total = total + residual.to(compute)
    wide = in_fp32 or (residual is not None and residual.dtype == compute)
    return total, total if wide else total.to(x.dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_sv: Tensor,
        residual_sv: Tensor,
        weight_v: Tensor,
        eps: float,
        wide: bool,
        kernel: str,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float32 if wide else x_sv.dtype
        y_sv, stream_sv = native.add_forward(x_sv, residual_sv, weight_v, eps, dtype)
        # A sum that was rounded for storage is not what was normalised.
        exact = dtype == torch.float32
        ctx.save_for_backward(weight_v, *((stream_sv,) if exact else (x_sv, residual_sv)))
        ctx.eps, ctx.kernel, ctx.dtypes = eps, kernel, (x_sv.dtype, residual_sv.dtype)
        ctx.set_materialize_grads(False)
        return y_sv, stream_sv

    @staticmethod
    def backward(ctx: Any, grad_y_sv: Tensor | None, grad_stream_sv: Tensor | None) -> Any:
        weight_v, *terms = ctx.saved_tensors
        guard("add_rms_norm", grad_y=grad_y_sv, grad_residual=grad_stream_sv)
        rest = (None, None, None)
        if grad_y_sv is None:
            if grad_stream_sv is None:
                return (None, None, None, *rest)
            return (*(grad_stream_sv.to(dtype) for dtype in ctx.dtypes), None, *rest)
        if torch.is_grad_enabled():
            grads = _differentiable(ctx, grad_y_sv, grad_stream_sv, weight_v, terms)
        else:
            grads = native.add_backward(
                grad_y_sv, grad_stream_sv, terms, weight_v, ctx.eps, ctx.dtypes
            )
        guard("add_rms_norm", grad_x=grads[0], grad_residual=grads[1], grad_weight=grads[2])
        return (*grads, *rest)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode("add_rms_norm")


def _differentiable(
    ctx: Any,
    grad_y_sv: Tensor,
    grad_stream_sv: Tensor | None,
    weight_v: Tensor,
    terms: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    if ctx.kernel == "native":
        raise BackendError(
            "add_rms_norm: impl='native' has no second derivative; the kernel's backward is not "
            "differentiable. Use impl='auto' or impl='portable'."
        )
    total_sv = terms[0] if len(terms) == 1 else terms[0].float() + terms[1].float()
    size = weight_v.shape[0]
    pull = torch.func.vjp(lambda t, w: plain_norm(t, w, ctx.eps, size), total_sv, weight_v)[1]
    grad_sv, grad_weight_v = pull((grad_y_sv.float(),))
    if grad_stream_sv is not None:
        grad_sv = grad_sv + grad_stream_sv.float()
    return grad_sv.to(ctx.dtypes[0]), grad_sv.to(ctx.dtypes[1]), grad_weight_v
