"""Values of ranks as an operator: `anymamba::rank_values_fwd` and `_bwd`."""

from torch import Tensor

from anymamba.ops.boundary import Operator
from anymamba.ops.native import Kernel
from anymamba.ops.ranks import native, portable

__all__ = ["RANK_VALUES"]


def _fake(x_sv: Tensor, weight_mv: Tensor) -> tuple[Tensor]:
    return (x_sv.new_empty(x_sv.shape[0], weight_mv.shape[0], x_sv.shape[1]),)


# Channels never meet, so a mapped axis becomes more channels.
RANK_VALUES = Operator(
    "rank_values",
    tensors=("x", "weight"),
    constants="",
    outputs=1,
    forward=portable.forward,
    backward=portable.backward,
    fake=_fake,
    composite=portable.forward,
    merge_axes=lambda *_: ((1, 1), (2,)),
    merge_constants=lambda _size, _tensors, constants: constants,
    native=Kernel(native.refusal, native.forward, native.backward),
)
