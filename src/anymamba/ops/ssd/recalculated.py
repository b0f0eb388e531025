"""The recomputing algorithm: chunk by chunk forward, and its adjoint chunk by chunk backward.

Nothing larger than one chunk's (b, h, f, f) matrix exists at any time. The backward keeps no
intermediate of the forward. It needs the state at the start of every chunk: a first pass recomputes
them and keeps every k-th one, a second pass refills one span of k chunks at a time, so that about
2 * sqrt(n) states are alive instead of n (README section 4).

These bodies run inside an operator, without autograd; in-place updates are safe here.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from anymamba.ops.ssd.adjoint import CoreGradients, chunk_adjoint
from anymamba.ops.ssd.stages import (
    k1_ssd_chunk_cumsum,
    k2_ssd_bmm,
    k3_ssd_chunk_state,
    k5_ssd_chunk_scan,
)
from anymamba.ops.ssd.walk import Walk

__all__ = ["core_backward", "core_forward"]


def core_forward(
    v_bsmhp: Tensor,
    da_bsh: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    initial_bhpr: Tensor,
    strict: bool,
    chunk_len: int,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run K1 to K5 one chunk at a time."""
    walk = Walk(v_bsmhp, chunk_len, cu_seqlens)
    initial = walk.rows(initial_bhpr)
    y_bsmhp = walk.buffer(v_bsmhp)
    final_bhpr = initial_bhpr.to(walk.chunks.compute, copy=True)
    carry = None
    for place in range(walk.count):
        v_bfhp, b_bfgr, c_bfgr = (walk.fused(x, place) for x in (v_bsmhp, b_bsmgr, c_bsmgr))
        cum_bhl, end_bh = k1_ssd_chunk_cumsum(walk.timed(da_bsh, place))
        entry_bhpr = walk.at_start(place, carry, initial)
        cb_bgfF = k2_ssd_bmm(c_bfgr, b_bfgr)
        y_bfhp = k5_ssd_chunk_scan(cum_bhl, v_bfhp, c_bfgr, cb_bgfF, entry_bhpr, strict)
        walk.write(y_bsmhp, place, y_bfhp)
        made_bhpr = k3_ssd_chunk_state(v_bfhp, b_bfgr, cum_bhl, end_bh)
        carry = made_bhpr.addcmul_(end_bh.exp()[..., None, None], entry_bhpr)
        final_bhpr = walk.keep_final(final_bhpr, place, carry)
    return y_bsmhp, final_bhpr


def core_backward(
    grad_y_bsmhp: Tensor,
    grad_final_bhpr: Tensor,
    v_bsmhp: Tensor,
    da_bsh: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    initial_bhpr: Tensor,
    strict: bool,
    chunk_len: int,
    cu_seqlens: Tensor | None,
) -> CoreGradients:
    """Walk the chunks from right to left (README section 4)."""
    walk = Walk(v_bsmhp, chunk_len, cu_seqlens)
    grad_v, grad_da, grad_b, grad_c = (walk.buffer(x) for x in (v_bsmhp, da_bsh, b_bsmgr, c_bsmgr))
    grad_final = walk.rows(grad_final_bhpr)
    grad_initial = torch.zeros_like(initial_bhpr, dtype=walk.chunks.compute)
    # The short form of the decay's gradient cancels; half types get the long one.
    pairwise = any(x.dtype != walk.chunks.compute for x in (v_bsmhp, b_bsmgr, c_bsmgr))
    carry = None
    states = _states_reversed(walk, v_bsmhp, da_bsh, b_bsmgr, initial_bhpr)
    for place, entry_bhpr, exit_bhpr in states:
        chunk = chunk_adjoint(
            walk.fused(grad_y_bsmhp, place),
            walk.fused(v_bsmhp, place),
            walk.timed(da_bsh, place),
            walk.fused(b_bsmgr, place),
            walk.fused(c_bsmgr, place),
            entry_bhpr,
            exit_bhpr,
            walk.at_end(place, carry, grad_final),
            strict,
            pairwise,
        )
        walk.write(grad_v, place, chunk.v)
        walk.write(grad_da, place, chunk.da)
        walk.write(grad_b, place, chunk.b)
        walk.write(grad_c, place, chunk.c)
        carry = chunk.initial
        grad_initial = walk.keep_initial(grad_initial, place, carry)
    grad_initial = walk.fill_empty(grad_initial, grad_final)
    return CoreGradients(grad_v, grad_da, grad_b, grad_c, grad_initial.to(initial_bhpr.dtype))


def _states_reversed(
    walk: Walk, v_bsmhp: Tensor, da_bsh: Tensor, b_bsmgr: Tensor, initial_bhpr: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (chunk, its entry state, its exit state) from the last chunk to the first."""
    initial = walk.rows(initial_bhpr)

    def advance(place: int, carry: Tensor | None) -> tuple[Tensor, Tensor]:
        entry_bhpr = walk.at_start(place, carry, initial)
        cum_bhl, end_bh = k1_ssd_chunk_cumsum(walk.timed(da_bsh, place))
        v_bfhp, b_bfgr = walk.fused(v_bsmhp, place), walk.fused(b_bsmgr, place)
        made_bhpr = k3_ssd_chunk_state(v_bfhp, b_bfgr, cum_bhl, end_bh)
        return entry_bhpr, made_bhpr.addcmul_(end_bh.exp()[..., None, None], entry_bhpr)

    span = math.isqrt(walk.count)
    spans = -(-walk.count // span)
    starts: list[Tensor | None] = [None]
    carry = None
    for place in range((spans - 1) * span):
        carry = advance(place, carry)[1]
        if (place + 1) % span == 0:
            starts.append(carry)
    for start in range((spans - 1) * span, -1, -span):
        carry = starts.pop()
        states = []
        for place in range(start, min(start + span, walk.count)):
            entry_bhpr, carry = advance(place, carry)
            states.append((place, entry_bhpr, carry))
        while states:
            yield states.pop()
