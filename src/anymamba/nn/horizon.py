"""Truncated back-propagation through depth: only the top virtual layers are differentiated.

Below the cut nothing is recorded. At the cut the activation h is attached to the stack's input x
with an identity gradient, dh/dx := 1: the leading term of d(x + sum of branches)/dx. So whatever
makes the input (an embedding, a projection, registers) still trains, and memory does not grow with
depth. Values are never touched.
"""

from typing import Any

import torch
from torch import Tensor

from anymamba.errors import ConfigError

__all__ = ["attach", "cut_of"]


def cut_of(grad_horizon: int | None, virtual: int) -> int:
    """Return how many virtual layers, from the bottom, are not differentiated.

    Example:
        >>> cut_of(4, 16), cut_of(None, 16), cut_of(99, 16)
        (12, 0, 0)
    """
    if grad_horizon is None:
        return 0
    if grad_horizon < 0:
        raise ConfigError(
            f"cut_of: grad_horizon must not be negative; got {grad_horizon}. "
            "None differentiates all layers."
        )
    return max(0, virtual - grad_horizon)


def attach(value: Tensor, source: Tensor) -> Tensor:
    """Return `value`, whose gradient goes to `source` unchanged and to nothing else.

    Args:
        value: what goes on; any dtype.
        source: where the gradient goes; same shape.

    Example:
        >>> x = torch.tensor([1.0], requires_grad=True)
        >>> attach(torch.tensor([5.0]), x).mul(3).backward()
        >>> x.grad
        tensor([3.])
    """
    return _Attach.apply(value.detach(), source)  # pyright: ignore[reportReturnType]


class _Attach(torch.autograd.Function):
    """Not `value + source - source.detach()`: that rounds in half types, and inf - inf is NaN."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, source: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.to(ctx.dtype)
