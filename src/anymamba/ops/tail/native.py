"""The tail and the gated product on the CPU kernel (README 6): the bodies of `portable`."""

from typing import Any

from torch import Tensor

from anymamba.ops.native import check_storage, run_kernel
from anymamba.ops.norm.native import by_rows, real_bits

__all__ = [
    "product_backward",
    "product_forward",
    "product_refusal",
    "tail_backward",
    "tail_forward",
    "tail_refusal",
]

# Orders of norm and gate, as the kernel counts them.
ORDERS = ("none", "before", "after")

Row = tuple[Tensor | None, ...]


def tail_refusal(
    y_smv: Tensor,
    x_smv: Tensor,
    z_sv: Tensor,
    skip_v: Tensor,
    weight_v: Tensor,
    spread_mv: Tensor,
    merge_mv: Tensor,
) -> str | None:
    """Say why the kernel cannot serve these tensors; None when it can."""
    parameters = {"skip": skip_v, "weight": weight_v, "spread": spread_mv, "merge": merge_mv}
    return check_storage(y=y_smv, x=x_smv, z=z_sv, **parameters)


def tail_forward(*args: Any) -> tuple[Tensor]:
    """Compute the tail of rows."""
    tensors, constants = args[:7], args[7:]
    z_sv = tensors[2]
    out_sv = z_sv.new_empty(z_sv.shape)
    run_kernel("tail_forward", (*_present(tensors, constants), out_sv), _sizes(tensors, constants))
    return (out_sv,)


def tail_backward(grad_sv: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Compute the gradients of all tensors from the inputs alone."""
    tensors, constants = args[:7], args[7:]
    grads = tuple(tensor.new_empty(tensor.shape) for tensor in tensors)
    given, wanted = _present(tensors, constants), _present(grads, constants)
    run_kernel("tail_backward", (by_rows(grad_sv), *given, *wanted), _sizes(tensors, constants))
    for grad, used in zip(grads, wanted, strict=True):
        if used is None:
            grad.zero_()
    return grads


def product_refusal(value_sv: Tensor, gate_sv: Tensor) -> str | None:
    """Say why the kernel cannot serve these tensors; None when it can."""
    return check_storage(value=value_sv, gate=gate_sv)


def product_forward(value_sv: Tensor, gate_sv: Tensor) -> tuple[Tensor]:
    """Compute `value * silu(gate)`."""
    out_sv = value_sv.new_empty(value_sv.shape)
    run_kernel("tail_forward", (*_pair(value_sv, gate_sv), out_sv), _product_sizes(value_sv))
    return (out_sv,)


def product_backward(grad_sv: Tensor, value_sv: Tensor, gate_sv: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of value and gate from the inputs alone."""
    grads = value_sv.new_empty(value_sv.shape), gate_sv.new_empty(gate_sv.shape)
    tensors = (by_rows(grad_sv), *_pair(value_sv, gate_sv), *_pair(*grads))
    run_kernel("tail_backward", tensors, _product_sizes(value_sv))
    return grads


def _present(tensors: tuple[Tensor, ...], constants: tuple[Any, ...]) -> Row:
    """Return the kernel's tensors; the placeholders of what is not there become None."""
    y_smv, x_smv, z_sv, skip_v, weight_v, spread_mv, merge_mv = tensors
    _, _, order, ranked = constants
    return (
        by_rows(y_smv),
        by_rows(x_smv),
        by_rows(z_sv),
        skip_v,
        None if order == "none" else weight_v,
        spread_mv if ranked else None,
        merge_mv if ranked else None,
    )


def _pair(value_sv: Tensor, gate_sv: Tensor) -> Row:
    return by_rows(value_sv).unsqueeze(1), None, by_rows(gate_sv), None, None, None, None


def _sizes(tensors: tuple[Tensor, ...], constants: tuple[Any, ...]) -> tuple[int, ...]:
    eps, group_size, order, _ = constants
    group = tensors[0].shape[-1] if order == "none" else group_size
    return (*tensors[0].shape, group, ORDERS.index(order), real_bits(eps))


def _product_sizes(value_sv: Tensor) -> tuple[int, ...]:
    rows, channels = value_sv.shape
    # One group of all channels; of none there is no group, and a group's width is divided by.
    return rows, 1, channels, max(channels, 1), ORDERS.index("none"), real_bits(0.0)
