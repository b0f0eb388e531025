"""Values of ranks in plain torch (README 2 and 4)."""

from torch import Tensor

from anymamba.ops.numerics import accumulate_dtype

__all__ = ["backward", "forward"]


def forward(x_sv: Tensor, weight_mv: Tensor) -> tuple[Tensor]:
    """Return the values of rows."""
    compute = accumulate_dtype(x_sv.dtype)
    # The product is laid out like its factors; from a transposed one the scan would copy it.
    weight_mv = weight_mv.to(compute).contiguous()
    return ((x_sv.unsqueeze(1) * weight_mv).to(x_sv.dtype),)


def backward(grad_smv: Tensor, x_sv: Tensor, weight_mv: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and weight from the inputs alone."""
    compute = accumulate_dtype(x_sv.dtype)
    grad_smv = grad_smv.to(compute)
    grad_x_sv = (grad_smv * weight_mv.to(compute)).sum(1)
    grad_weight_mv = (grad_smv * x_sv.to(compute).unsqueeze(1)).sum(0)
    return grad_x_sv.to(x_sv.dtype), grad_weight_mv.to(weight_mv.dtype)
