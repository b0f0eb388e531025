"""Values of ranks on the CPU kernel (README 6): the bodies of `portable`."""

from torch import Tensor

from anymamba.ops.native import check_storage, new_tensor, run_kernel
from anymamba.ops.norm.native import by_rows

__all__ = ["backward", "forward", "refusal"]


def refusal(x_sv: Tensor, weight_mv: Tensor) -> str | None:
    """Say why the kernel cannot serve these tensors; None when it can."""
    return check_storage(x=x_sv, weight=weight_mv)


def forward(x_sv: Tensor, weight_mv: Tensor) -> tuple[Tensor]:
    """Compute the values of rows."""
    sizes = (x_sv.shape[0], *weight_mv.shape)
    y_smv = new_tensor(x_sv, sizes)
    run_kernel("values_forward", (by_rows(x_sv), weight_mv, y_smv), sizes)
    return (y_smv,)


def backward(grad_smv: Tensor, x_sv: Tensor, weight_mv: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and weight from the inputs alone."""
    grads = new_tensor(x_sv, x_sv.shape), weight_mv.new_empty(weight_mv.shape)
    above_smv = by_rows(grad_smv.to(x_sv.dtype))
    sizes = (x_sv.shape[0], *weight_mv.shape)
    run_kernel("values_backward", (above_smv, by_rows(x_sv), weight_mv, *grads), sizes)
    return grads
