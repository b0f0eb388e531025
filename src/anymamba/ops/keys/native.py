"""Keys and queries on the CPU kernel (README 6): the same signatures as in `composite`."""

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymamba.ops.native import Kernel, check_storage, new_tensor, run_kernel

__all__ = ["BY_ANGLE", "BY_QUATERNION"]

_PAIRINGS = {"half_split": 0, "interleaved": 1}
_BLOCKS = 2
_NAMES = ("b", "c", "b_weight", "c_weight", "b_bias", "c_bias", "turn", "dt", "initial")
_FORWARD, _BACKWARD = "keys_forward", "keys_backward"
Tensors = tuple[Tensor, ...]


def _refusal(*tensors: Tensor) -> str | None:
    """Say why the kernel cannot serve these tensors; None when it can."""
    named = dict(zip(_NAMES, tensors, strict=True))
    if (reason := check_storage(**named)) is not None:
        return reason
    # A quaternion's channels come from the projection; rates are computed, like step sizes.
    wide = ("dt", "initial") if named["turn"].dim() == 5 else ("turn", "dt", "initial")
    for name in wide:
        if named[name].dtype != torch.float32:
            return f"the compiled kernel takes {name} in float32, and it is {named[name].dtype}"
    return None


def _forward(
    *tensors: Tensor, cu_seqlens: Tensor | None, sizes: Callable[..., list[int]]
) -> Tensors:
    b_bsmgr, dt_bsh, initial = tensors[0], tensors[7], tensors[8]
    b, s, m, _, r = b_bsmgr.shape
    shape = (b, s, m, dt_bsh.shape[2], r)
    outputs = (
        new_tensor(b_bsmgr, shape),
        new_tensor(b_bsmgr, shape),
        initial.new_empty(initial.shape),
    )
    run_kernel(_FORWARD, (*_inputs(tensors, cu_seqlens), *outputs), sizes(tensors))
    return outputs


def _backward(
    *tensors: Tensor, cu_seqlens: Tensor | None, sizes: Callable[..., list[int]]
) -> Tensors:
    given, tensors = tensors[:3], tensors[3:]
    grads = tuple(new_tensor(tensor, tensor.shape) for tensor in tensors)
    given = tuple(grad.contiguous() for grad in given)
    run_kernel(_BACKWARD, (*given, *_inputs(tensors, cu_seqlens), *grads), sizes(tensors))
    return grads


def _inputs(tensors: Tensors, cu_seqlens: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the tensors as the kernel reads them: entries of a head or row one after another."""
    turn, initial = tensors[6], tensors[8]
    by_rows = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    if turn.dim() == 5:
        by_rows[6] = turn if turn.stride()[3:] == (3, 1) else turn.contiguous()
        by_rows[8] = initial if initial.stride()[2:] == (4, 1) else initial.contiguous()
    return (*by_rows, None if cu_seqlens is None else cu_seqlens.to(torch.int64))


def _sizes(
    tensors: Tensors, turns: bool, pairing: int, b_eps: float, c_eps: float, rotation_range: float
) -> list[int]:
    dt_bsh, initial = tensors[7], tensors[8]
    channels = initial.shape[2]
    numbers = struct.unpack("3q", struct.pack("3d", b_eps, c_eps, rotation_range))
    b, s, m, g, r = tensors[0].shape
    turning = channels if turns else 0
    return [b, s, m, g, dt_bsh.shape[2], r, channels, turning, initial.shape[0], pairing, *numbers]


def _angle(run: Callable[..., Tensors]) -> Callable[..., Tensors]:
    def body(*args: Any) -> Tensors:
        *tensors, cu_seqlens, b_eps, c_eps, pairing, turns = args

        def sizes(given: Tensors) -> list[int]:
            # Rows in halves have an even width. Where nothing turns, any width goes and no entry
            # has a partner: the kernel then reads rows from end to end.
            kind = _PAIRINGS[pairing if turns else "interleaved"]
            return _sizes(given, turns, kind, b_eps, c_eps, 0.0)

        return run(*tensors, cu_seqlens=cu_seqlens, sizes=sizes)

    return body


def _quaternion(run: Callable[..., Tensors]) -> Callable[..., Tensors]:
    def body(*args: Any) -> Tensors:
        *tensors, cu_seqlens, b_eps, c_eps, rotation_range, turns = args

        def sizes(given: Tensors) -> list[int]:
            return _sizes(given, turns, _BLOCKS, b_eps, c_eps, rotation_range)

        return run(*tensors, cu_seqlens=cu_seqlens, sizes=sizes)

    return body


BY_ANGLE = Kernel(_refusal, _angle(_forward), _angle(_backward))
BY_QUATERNION = Kernel(_refusal, _quaternion(_forward), _quaternion(_backward))
