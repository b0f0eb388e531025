"""The definitions, one token at a time: slow, plain, and the judge of everything else here."""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from anymamba.ops.rotation.angles import AngleScan
from anymamba.ops.rotation.quaternion import QuaternionScan

__all__ = ["cumulate_angles_reference", "cumulate_quaternions_reference"]


def cumulate_angles_reference(
    increment_bsha: Tensor, initial_bha: Tensor, *, cu_seqlens: Tensor | None = None
) -> AngleScan:
    """Add increments one by one; the angles keep their whole turns, the final one does not."""
    rows, finals = [], []
    for tokens_bsha, angle_bha in _sequences(increment_bsha, initial_bha, cu_seqlens):
        for step_bha in tokens_bsha.unbind(1):
            angle_bha = angle_bha + step_bha
            rows.append(angle_bha)
        turns = torch.round(angle_bha.detach() / (2 * math.pi))
        finals.append(angle_bha - 2 * math.pi * turns)
    return AngleScan(torch.stack(rows, 1), torch.cat(finals))


def cumulate_quaternions_reference(
    increment_bshj4: Tensor, initial_bhj4: Tensor, *, cu_seqlens: Tensor | None = None
) -> QuaternionScan:
    """Multiply increments on from the left one by one; give every product unit length."""
    rows, finals = [], []
    for tokens_bshj4, product_bhj4 in _sequences(increment_bshj4, initial_bhj4, cu_seqlens):
        for step_bhj4 in tokens_bshj4.unbind(1):
            product_bhj4 = _hamilton(step_bhj4, product_bhj4)
            rows.append(_unit(product_bhj4))
        finals.append(_unit(product_bhj4))
    return QuaternionScan(torch.stack(rows, 1), torch.cat(finals))


def _sequences(
    tokens_bs: Tensor, initial_b: Tensor, cu_seqlens: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    if cu_seqlens is None:
        yield tokens_bs, initial_b
        return
    borders = cu_seqlens.tolist()
    for place, (start, end) in enumerate(pairwise(borders)):
        yield tokens_bs[:, start:end], initial_b[place : place + 1]


def _hamilton(p: Tensor, q: Tensor) -> Tensor:
    """Multiply by scalar and vector parts: (s t - u.v, s v + t u + u x v)."""
    s, u = p[..., :1], p[..., 1:]
    t, v = q[..., :1], q[..., 1:]
    scalar = s * t - (u * v).sum(-1, keepdim=True)
    return torch.cat([scalar, s * v + t * u + torch.linalg.cross(u, v, dim=-1)], -1)


def _unit(q: Tensor) -> Tensor:
    return q / q.square().sum(-1, keepdim=True).sqrt()
