"""Cross-entropy as an operator: `anymamba::cross_entropy_rows_fwd` and `_bwd`."""

from typing import Any

from torch import Tensor

from anymamba.ops.boundary import Operator
from anymamba.ops.loss import native, portable
from anymamba.ops.native import Kernel
from anymamba.ops.numerics import accumulate_dtype

__all__ = ["CROSS_ENTROPY_ROWS"]


def _fake(logits_sw: Tensor, *_: Any) -> tuple[Tensor]:
    dtype = accumulate_dtype(logits_sw.dtype)
    return (logits_sw.new_empty(logits_sw.shape[0], dtype=dtype),)


def _repeat(size: int, _tensors: Any, constants: tuple[Any, ...]) -> tuple[Any, ...]:
    (targets_s,) = constants
    return (targets_s.repeat(size),)


# Rows never meet, so a mapped axis becomes more rows, with the targets repeated.
CROSS_ENTROPY_ROWS = Operator(
    "cross_entropy_rows",
    tensors=("logits",),
    constants="Tensor targets",
    outputs=1,
    forward=portable.forward,
    backward=portable.backward,
    fake=_fake,
    composite=portable.composite,
    merge_axes=lambda *_: ((0,), (0,)),
    merge_constants=_repeat,
    native=Kernel(native.refusal, native.forward, native.backward),
)
