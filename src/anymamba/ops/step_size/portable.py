"""Step sizes in plain torch (README 3 and 4)."""

from torch import Tensor

from anymamba.ops.numerics import accumulate_dtype, softplus

__all__ = ["backward", "forward"]


def forward(x_sv: Tensor, bias_v: Tensor) -> tuple[Tensor]:
    """Return the step sizes of rows."""
    compute = accumulate_dtype(x_sv.dtype)
    return (softplus(x_sv.to(compute) + bias_v.to(compute)),)


def backward(grad_sv: Tensor, x_sv: Tensor, bias_v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and bias from the inputs alone."""
    compute = accumulate_dtype(x_sv.dtype)
    open_sv = (x_sv.to(compute) + bias_v.to(compute)).sigmoid()
    grad_x_sv = grad_sv.to(compute) * open_sv
    return grad_x_sv.to(x_sv.dtype), grad_x_sv.sum(0).to(bias_v.dtype)
