"""The tail as operators: `anymamba::gated_tail_*` and `anymamba::gated_product_*`.

Rows are all leading axes flattened (s), heads and their width one axis (v).
"""

from typing import Any

from torch import Tensor

from anymamba.ops.boundary import Operator
from anymamba.ops.native import Kernel
from anymamba.ops.tail import native, portable

__all__ = ["GATED_PRODUCT", "GATED_TAIL"]


def _fake_tail(_y: Tensor, _x: Tensor, z_sv: Tensor, *_: Any) -> tuple[Tensor]:
    return (z_sv.new_empty(z_sv.shape),)


def _fake_product(value_sv: Tensor, *_: Any) -> tuple[Tensor]:
    return (value_sv.new_empty(value_sv.shape),)


# Groups never meet, so a mapped axis (even of the parameters) becomes more groups of one width.
# `weight` counts unless the order is "none", `spread` and `merge` count if `ranked`; where they do
# not, one number stands in their place.
GATED_TAIL = Operator(
    "gated_tail",
    tensors=("y", "x", "z", "skip", "weight", "spread", "merge"),
    constants="float eps, int group_size, str order, bool ranked",
    outputs=1,
    forward=portable.tail,
    backward=portable.tail_backward,
    fake=_fake_tail,
    composite=portable.tail,
    merge_axes=lambda *_: ((2, 2, 1, 0, 0, 1, 1), (1,)),
    merge_constants=lambda _size, _tensors, constants: constants,
    native=Kernel(native.tail_refusal, native.tail_forward, native.tail_backward),
)
GATED_PRODUCT = Operator(
    "gated_product",
    tensors=("value", "gate"),
    constants="",
    outputs=1,
    forward=portable.product,
    backward=portable.product_backward,
    fake=_fake_product,
    composite=portable.product,
    merge_axes=lambda *_: ((1, 1), (1,)),
    merge_constants=lambda _size, _tensors, constants: constants,
    native=Kernel(native.product_refusal, native.product_forward, native.product_backward),
)
