"""The gated norm on the CPU kernel of a block's tail (`ops/tail/README.md`), without its skip."""

from torch import Tensor

from anymamba.ops.native import check_storage, run_kernel
from anymamba.ops.norm.native import by_rows, real_bits

__all__ = ["backward", "forward", "refusal"]

# How the kernel names the order of norm and gate: 0 is no norm.
BEFORE, AFTER = 1, 2


def refusal(x_sv: Tensor, z_sv: Tensor, weight_v: Tensor) -> str | None:
    """Say why the kernel cannot serve these tensors; None when it can."""
    return check_storage(x=x_sv, z=z_sv, weight=weight_v)


def forward(
    x_sv: Tensor, z_sv: Tensor, weight_v: Tensor, eps: float, group_size: int, before: bool
) -> tuple[Tensor]:
    """Normalise and gate rows in groups."""
    y_sv = x_sv.new_empty(x_sv.shape)
    tensors = (*_inputs(x_sv, z_sv, weight_v), y_sv)
    run_kernel("tail_forward", tensors, _sizes(x_sv, eps, group_size, before))
    return (y_sv,)


def backward(
    grad_y_sv: Tensor,
    x_sv: Tensor,
    z_sv: Tensor,
    weight_v: Tensor,
    eps: float,
    group_size: int,
    before: bool,
) -> tuple[Tensor, ...]:
    """Compute the gradients of x, z and weight from the inputs alone."""
    grads = tuple(tensor.new_empty(tensor.shape) for tensor in (x_sv, z_sv, weight_v))
    tensors = (by_rows(grad_y_sv), *_inputs(x_sv, z_sv, weight_v), *_inputs(*grads))
    run_kernel("tail_backward", tensors, _sizes(x_sv, eps, group_size, before))
    return grads


def _inputs(x_sv: Tensor, z_sv: Tensor, weight_v: Tensor) -> tuple[Tensor | None, ...]:
    """Return the kernel's tensors: y, x, z, skip, weight, spread, merge; y has one rank."""
    return by_rows(x_sv).unsqueeze(1), None, by_rows(z_sv), None, weight_v, None, None


def _sizes(x_sv: Tensor, eps: float, group_size: int, before: bool) -> tuple[int, ...]:
    rows, channels = x_sv.shape
    return rows, 1, channels, group_size, BEFORE if before else AFTER, real_bits(eps)
