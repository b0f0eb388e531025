"""What an operator offers as its CPU kernel, and why it may not be used for a call."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.ops.native.library import native_status

__all__ = ["Kernel", "check_storage", "refusal_of"]

_PLAIN = (Tensor, torch.nn.Parameter)
# Beside half-type activations, coefficients and states are float32.
_STORAGE = (torch.float32, torch.bfloat16)


class Kernel(NamedTuple):
    """The native bodies of an operator; their signatures are those of the portable ones."""

    refusal: Callable[..., str | None]  # of the operator's tensors: why it cannot serve them
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]


def refusal_of(kernel: Kernel | None, tensors: Sequence[Tensor]) -> str | None:
    """Say why the CPU kernel cannot serve these tensors; None when it can.

    A pure function of device, dtypes and sizes, of what was built, and of the settings.
    """
    if kernel is None:
        return "this operator has no compiled kernel"
    devices = sorted({tensor.device.type for tensor in tensors})
    if devices != ["cpu"]:
        return f"the compiled kernels run on the CPU, and the tensors are on {', '.join(devices)}"
    if (why_not := _why_not()) is not None:
        return why_not
    # A subclass (a fake tensor, a sharded one) has no memory that a kernel could read. A traced
    # call is different: it stops at the operator, which has a fake of its own.
    if not torch.compiler.is_compiling():
        if any(type(t) not in _PLAIN for t in tensors):
            return "the compiled kernels read plain tensors only"
        # The imaginary part of a conjugate lies in memory with the other sign.
        if any(t.is_neg() for t in tensors):
            return "the compiled kernels do not read lazily negated tensors (resolve_neg)"
    return kernel.refusal(*tensors)


def _why_not() -> str | None:
    return native_status().why_not


# What `torch.compiler.assume_constant_result` does; calling that would import the whole compiler.
_why_not._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def check_storage(**tensors: Any) -> str | None:
    """Say which tensor is stored in a dtype that the kernels do not read; None when none is."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _STORAGE:
            return f"the compiled kernels store float32 or bfloat16, and {name} is {tensor.dtype}"
    return None
