"""Step sizes as an operator: `anymamba::step_size_fwd` and `_bwd`."""

from torch import Tensor

from anymamba.ops.boundary import Operator
from anymamba.ops.native import Kernel
from anymamba.ops.numerics import accumulate_dtype
from anymamba.ops.step_size import native, portable

__all__ = ["STEP_SIZE"]


def _fake(x_sv: Tensor, _bias: Tensor) -> tuple[Tensor]:
    return (x_sv.new_empty(x_sv.shape, dtype=accumulate_dtype(x_sv.dtype)),)


# Channels never meet, so a mapped axis becomes more channels.
STEP_SIZE = Operator(
    "step_size",
    tensors=("x", "bias"),
    constants="",
    outputs=1,
    forward=portable.forward,
    backward=portable.backward,
    fake=_fake,
    composite=portable.forward,
    merge_axes=lambda *_: ((1, 0), (1,)),
    merge_constants=lambda _size, _tensors, constants: constants,
    native=Kernel(native.refusal, native.forward, native.backward),
)
