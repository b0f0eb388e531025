"""Processes in a line: what each hands to the next, and what comes back in the backward.

Two operations, both differentiable. `shift` gives every rank its predecessor's tensors. The
exclusive scan gives every rank the composition of all affine maps before its own:

    x[0] = 0        x[k+1] = m[k] x[k] + s[k]

With the gradient g[k] of x[k] on each rank, the adjoint is the same scan from the other end:

    r[K-1] = 0      r[k-1] = m[k]^T r[k] + g[k]      grad s[k] = r[k],  grad m[k] = <r[k], x[k]>

Maps are composed in log2(K) rounds; a round sends one map, whatever the length of the sequence.
Every rank must call every operation, in the same order, and run its backward: messages are paired
by their order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from anymamba.ops import quaternion_conjugate, quaternion_multiply, wrap_angle

__all__ = ["ANGLES", "QUATERNIONS", "SCALES", "Algebra", "Ring", "Traffic"]


class Algebra(NamedTuple):
    """How a multiplier m acts on a state: its product, adjoint, gradient, and what tidies a sum."""

    apply: Callable[[Tensor, Tensor], Tensor]
    adjoint: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    tidy: Callable[[Tensor], Tensor]


def _spread(m: Tensor, s: Tensor) -> Tensor:
    return m.reshape(*m.shape, *[1] * (s.dim() - m.dim()))


def _scale(m: Tensor, s: Tensor) -> Tensor:
    return _spread(m, s) * s


def _scale_gradient(grad: Tensor, state: Tensor, m: Tensor) -> Tensor:
    return (grad * state).flatten(m.dim()).sum(-1) if grad.dim() > m.dim() else grad * state


def _turn_gradient(grad: Tensor, state: Tensor, m: Tensor) -> Tensor:
    return quaternion_multiply(grad, quaternion_conjugate(state))


def _same(x: Tensor) -> Tensor:
    return x


# m is (b, h) or (b, i, r), on states with further axes behind.
SCALES = Algebra(_scale, _same, _scale_gradient, _same)
# m is 0 or 1: angles add up; whole turns are taken off, so that no sum grows with the ranks.
ANGLES = Algebra(_scale, _same, _scale_gradient, wrap_angle)
# m is a quaternion, or zero.
QUATERNIONS = Algebra(quaternion_multiply, quaternion_conjugate, _turn_gradient, _same)


@dataclass
class Traffic:
    """What a rank has sent."""

    messages: int = 0
    bytes: int = 0


class Ring:
    """The processes that share a sequence, in its order; the first one holds its beginning.

    Args:
        group: of `torch.distributed`; None is the whole world.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None) -> None:
        """Find this process's place."""
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = Traffic()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ring":
        """Return itself: a process group cannot be copied."""
        return self

    def shift(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the predecessor's tensors; zeros on the first rank. Differentiable."""
        return _Shift.apply(self, *tensors)

    def exclusive_scan(self, algebra: Algebra, m: Tensor, s: Tensor) -> Tensor:
        """Return what the maps of all ranks before this one make of zero. Differentiable.

        Args:
            algebra: how the multiplier acts.
            m: this rank's multiplier.
            s: what this rank adds; the same shape on every rank.
        """
        return _ExclusiveScan.apply(self, algebra, m, s)

    def send_on(
        self, tensors: Sequence[Tensor], distance: int, lowest: int = 0
    ) -> list[Tensor] | None:
        """Send to the rank `distance` further on, and return what comes from as far behind.

        Args:
            tensors: of the same shapes and dtypes on every rank.
            distance: negative runs the line backwards.
            lowest: ranks nearer to the start of the direction than this have nothing to send.

        Returns:
            None where there is no sender.
        """
        direction = 1 if distance > 0 else -1
        place = self.rank if distance > 0 else self.size - 1 - self.rank
        reach = abs(distance)
        calls, incoming = [], None
        flat = _to_bytes(tensors)
        if place >= lowest and place + reach < self.size:
            calls.append(dist.P2POp(dist.isend, flat, self._peer(reach * direction), self.group))
            self.traffic.messages += 1
            self.traffic.bytes += flat.numel()
        if place - reach >= lowest:
            incoming = torch.empty_like(flat)
            calls.append(
                dist.P2POp(dist.irecv, incoming, self._peer(-reach * direction), self.group)
            )
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        return None if incoming is None else _from_bytes(incoming, tensors)

    def _peer(self, distance: int) -> int:
        rank = self.rank + distance
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def scan(self, algebra: Algebra, m: Tensor, s: Tensor, direction: int = 1) -> Tensor:
        """Run the exclusive scan from either end; not differentiable."""
        place = self.rank if direction > 0 else self.size - 1 - self.rank
        held = self.send_on((m, s), direction)
        m, s = held or (m, s)
        reach = 1
        # The first rank holds no map now, so one map less has to be composed.
        while reach < self.size - 1:
            earlier = self.send_on((m, s), reach * direction, lowest=1)
            if earlier is not None:
                s = algebra.tidy(algebra.apply(m, earlier[1]) + s)
                m = algebra.apply(m, earlier[0])
            reach *= 2
        return s if place else torch.zeros_like(s)


def _to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.detach().contiguous().flatten().view(torch.uint8) for x in tensors])


def _from_bytes(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([x.numel() * x.element_size() for x in like])
    # A part starts anywhere in the buffer; a copy is aligned as its dtype wants it.
    return [part.clone().view(x.dtype).view(x.shape) for part, x in zip(parts, like, strict=True)]


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: Ring, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ring = ring
        received = ring.send_on(tensors, 1)
        return tuple(received or [torch.zeros_like(x) for x in tensors])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        received = ctx.ring.send_on(grads, -1)
        return None, *(received or [torch.zeros_like(x) for x in grads])


class _ExclusiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: Ring, algebra: Algebra, m: Tensor, s: Tensor) -> Tensor:
        state = ring.scan(algebra, m, s)
        ctx.ring, ctx.algebra = ring, algebra
        ctx.save_for_backward(m, state)
        return state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        m, state = ctx.saved_tensors
        algebra = ctx.algebra
        grad_s = ctx.ring.scan(algebra._replace(tidy=_same), algebra.adjoint(m), grad, -1)
        grad_m = algebra.gradient(grad_s, state, m) if ctx.needs_input_grad[2] else None
        return None, None, grad_m, grad_s
