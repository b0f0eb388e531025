"""The selective scan as an operator: `anymamba::selective_scan_fwd` and `_bwd`."""

import torch
from torch import Tensor

from anymamba.ops.boundary import Operator
from anymamba.ops.native import Kernel
from anymamba.ops.numerics import accumulate_dtype
from anymamba.ops.packing import Packing
from anymamba.ops.selective_scan import native
from anymamba.ops.selective_scan.chunked import scan_backward, scan_forward
from anymamba.ops.selective_scan.reference import finish_outputs, run_tokens

__all__ = ["SELECTIVE_SCAN"]

# The borders come with the tables that follow from them, because deriving those checks the values
# of the borders, and that belongs outside the operator.
_CONSTANTS = (
    "bool b_is_constant, bool c_is_constant, int? chunk_len, "
    "Tensor? cu_seqlens, Tensor? sequence_s, Tensor? position_s"
)
_Constants = tuple[bool, bool, int | None, Tensor | None, Tensor | None, Tensor | None]


def _packing(constants: _Constants) -> Packing | None:
    cu_seqlens, sequence_s, position_s = constants[3:]
    if cu_seqlens is None or sequence_s is None or position_s is None:
        return None
    return Packing(cu_seqlens, sequence_s, position_s, None)


def _forward(u, dt, a, b, c, initial, skip, z, *constants):
    return scan_forward(u, dt, a, b, c, initial, skip, z, constants[2], _packing(constants))


def _backward(grad_y, grad_final, u, dt, a, b, c, initial, skip, z, *constants):
    tensors = (u, dt, a, b, c, initial, skip, z)
    return scan_backward(grad_y, grad_final, *tensors, constants[2], _packing(constants))


def _fake(u, dt, a, b, c, initial, skip, z, *constants):
    compute = accumulate_dtype(u.dtype)
    return (
        torch.empty(u.shape, dtype=u.dtype, device=u.device),
        torch.empty(initial.shape, dtype=compute, device=u.device),
    )


def _composite(u, dt, a, b, c, initial, skip, z, *constants):
    y, final = run_tokens(u, dt, a, b, c, initial, _packing(constants))
    skip, z = (x if x.numel() else None for x in (skip, z))
    return finish_outputs(y, u, skip, z), final


def _merge_axes(b_is_constant: bool, c_is_constant: bool, *rest):
    # Channels never meet, so mapped copies become channels. A mapped B (b, s, g, r) becomes
    # (b, s, V g, r): copy v of channel c is channel v i + c, and reads group v g + c // (i / g).
    axis_of_b, axis_of_c = (
        0 if is_constant else 2 for is_constant in (b_is_constant, c_is_constant)
    )
    return (2, 2, 0, axis_of_b, axis_of_c, 1, 0, 2), (2, 1)


def _merge_constants(size, tensors, constants):
    return tuple(constants)


# A skip (i) or gate z (b, s, i) of no channels is none: every tensor of an operator is present.
SELECTIVE_SCAN = Operator(
    "selective_scan",
    tensors=("u", "dt", "a", "b", "c", "initial", "skip", "z"),
    constants=_CONSTANTS,
    outputs=2,
    forward=_forward,
    backward=_backward,
    fake=_fake,
    composite=_composite,
    merge_axes=_merge_axes,
    merge_constants=_merge_constants,
    native=Kernel(native.refusal, native.forward, native.backward),
)
