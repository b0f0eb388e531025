"""Keys and queries as operators: `anymamba::keys_by_angle` and `anymamba::keys_by_quaternion`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymamba.ops.boundary import Operator
from anymamba.ops.keys import native
from anymamba.ops.keys.composite import by_angle, by_quaternion
from anymamba.ops.native import Kernel

__all__ = ["KEYS_BY_ANGLE", "KEYS_BY_QUATERNION"]

_TENSORS = ("b", "c", "b_weight", "c_weight", "b_bias", "c_bias")
_OUTPUTS = 3


def _pull(composite: Callable[..., Any], tensors: int) -> Callable[..., tuple[Tensor, ...]]:
    """Return the backward of a composite form, which is computed again from the inputs."""

    def backward(*args: Any) -> tuple[Tensor, ...]:
        grads, inputs = args[:_OUTPUTS], args[_OUTPUTS : _OUTPUTS + tensors]
        constants = args[_OUTPUTS + tensors :]
        return torch.func.vjp(lambda *given: composite(*given, *constants), *inputs)[1](grads)

    return backward


def _fake(b_bsmgr: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dt_bsh, initial = rest[6], rest[7]
    b, s, m, _, r = b_bsmgr.shape
    shape = (b, s, m, dt_bsh.shape[2], r)
    return b_bsmgr.new_empty(shape), b_bsmgr.new_empty(shape), initial.new_empty(initial.shape)


def _operator(
    name: str, turn: str, constants: str, composite: Callable[..., Any], kernel: Kernel
) -> Operator:
    tensors = (*_TENSORS, turn, "dt", "initial")
    return Operator(
        name,
        tensors=tensors,
        constants=f"Tensor? cu_seqlens, float b_eps, float c_eps, {constants}, bool turns",
        outputs=_OUTPUTS,
        forward=composite,
        backward=_pull(composite, len(tensors)),
        fake=_fake,
        composite=composite,
        # A mapped axis, even of the weights, becomes more groups with heads of their own.
        merge_axes=lambda *_: ((3, 3, 0, 0, 0, 0, 2, 2, 1), (3, 3, 1)),
        merge_constants=lambda _size, _tensors, constants: constants,
        native=kernel,
    )


KEYS_BY_ANGLE = _operator("keys_by_angle", "rate", "str pairing", by_angle, native.BY_ANGLE)
KEYS_BY_QUATERNION = _operator(
    "keys_by_quaternion", "raw", "float rotation_range", by_quaternion, native.BY_QUATERNION
)
