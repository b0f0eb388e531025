"""The recomputing algorithm: block by block forward, and its adjoint block by block backward.

Nothing larger than one block's (b, n, h, f, f) matrices exists at any time. The backward keeps no
intermediate of the forward. It needs the state at the start of every chunk: a first pass recomputes
them and keeps that of every k-th block, a second pass refills one span of k blocks at a time, so
that about 2 * sqrt(n) states are alive instead of n (README section 4).

These bodies run inside an operator, without autograd; in-place updates are safe here.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from anymamba.ops.ssd.adjoint import CoreGradients, block_adjoint, grown_outer
from anymamba.ops.ssd.stages import (
    ChunkDecay,
    add_own,
    k1_ssd_chunk_cumsum,
    k2_ssd_bmm,
    k3_ssd_chunk_state,
    k5_ssd_chunk_scan,
    over_positions,
    own_pairs,
)
from anymamba.ops.ssd.walk import Walk

__all__ = ["core_backward", "core_forward"]

Tensors = list[Tensor]


def core_forward(
    v_bsmhp: Tensor,
    da_bsh: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    initial_bhpr: Tensor,
    scale_bsh: Tensor,
    own_bsh: Tensor,
    chunk_len: int,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run K1 to K5 one block at a time."""
    walk = Walk(v_bsmhp, chunk_len, cu_seqlens)
    initial = walk.rows(initial_bhpr)
    y_bsmhp = walk.buffer(v_bsmhp)
    final_bhpr = _zeros(initial_bhpr, walk)
    carry = None
    for block in walk.blocks:
        v, b, c = (walk.fused(x, block) for x in (v_bsmhp, b_bsmgr, c_bsmgr))
        da, scale, own = (walk.timed(x, block) for x in (da_bsh, scale_bsh, own_bsh))
        scaled = over_positions(scale, v.shape[2]) * v
        decay, cb = k1_ssd_chunk_cumsum(da), k2_ssd_bmm(c, b)
        made_bnhpr = k3_ssd_chunk_state(scaled, b, decay)
        entries, exits = _pass_on(walk, block, made_bnhpr, decay, carry, initial)
        y = k5_ssd_chunk_scan(decay, scaled, c, cb, _joined(entries), strict=True)
        walk.write(y_bsmhp, block, add_own(y, own_pairs(cb, da.shape[2]), own, v))
        carry = exits[-1]
        final_bhpr = walk.keep_finals(final_bhpr, block, exits)
    return y_bsmhp, walk.fill_empty(final_bhpr, initial)


def core_backward(
    grad_y_bsmhp: Tensor,
    grad_final_bhpr: Tensor,
    v_bsmhp: Tensor,
    da_bsh: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    initial_bhpr: Tensor,
    scale_bsh: Tensor,
    own_bsh: Tensor,
    chunk_len: int,
    cu_seqlens: Tensor | None,
) -> CoreGradients:
    """Walk the blocks from right to left (README section 4)."""
    walk = Walk(v_bsmhp, chunk_len, cu_seqlens)
    inputs = v_bsmhp, da_bsh, b_bsmgr, c_bsmgr, scale_bsh, own_bsh
    buffers = [walk.buffer(x) for x in inputs]
    grad_final = walk.rows(grad_final_bhpr)
    grad_initial = _zeros(initial_bhpr, walk)
    carry = None
    for block, entries in _states_reversed(walk, v_bsmhp, da_bsh, b_bsmgr, initial_bhpr, scale_bsh):
        grad_y, v, b, c = (walk.fused(x, block) for x in (grad_y_bsmhp, v_bsmhp, b_bsmgr, c_bsmgr))
        da, scale, own = (walk.timed(x, block) for x in (da_bsh, scale_bsh, own_bsh))
        decay = k1_ssd_chunk_cumsum(da)
        grad_exits, grad_entries = _pass_back(
            walk, block, grown_outer(grad_y, c, decay), decay, carry, grad_final
        )
        grads = block_adjoint(
            grad_y,
            v,
            decay,
            b,
            c,
            scale,
            own,
            _joined(entries),
            _joined(grad_exits),
        )
        for target, piece in zip(buffers, grads, strict=True):
            walk.write(target, block, piece)
        carry = grad_entries[0]
        grad_initial = walk.keep_initials(grad_initial, block, grad_entries)
    grad_initial = walk.fill_empty(grad_initial, grad_final).to(initial_bhpr.dtype)
    grad_v, grad_da, grad_b, grad_c, grad_scale, grad_own = buffers
    return CoreGradients(grad_v, grad_da, grad_b, grad_c, grad_initial, grad_scale, grad_own)


def _zeros(state_bhpr: Tensor, walk: Walk) -> Tensor:
    # Contiguous whatever the argument is: the fake says so.
    return torch.zeros(state_bhpr.shape, dtype=walk.chunks.compute, device=state_bhpr.device)


def _joined(states: Tensors) -> Tensor:
    """Lay the states of a block's chunks side by side: (b, n, h, p, r)."""
    return states[0].unsqueeze(1) if len(states) == 1 else torch.stack(states, 1)


def _pass_on(
    walk: Walk,
    block: range,
    made_bnhpr: Tensor,
    decay: ChunkDecay,
    carry: Tensor | None,
    initial: Tensor,
) -> tuple[Tensors, Tensors]:
    """K4: return the states before and after each chunk of a block."""
    keep_bnh11 = decay.end().exp()[..., None, None]
    entries, exits = [], []
    for offset, place in enumerate(block):
        entry = walk.at_start(place, carry, initial)
        carry = torch.addcmul(made_bnhpr[:, offset], keep_bnh11[:, offset], entry)
        entries.append(entry)
        exits.append(carry)
    return entries, exits


def _pass_back(
    walk: Walk,
    block: range,
    own_bnhpr: Tensor,
    decay: ChunkDecay,
    carry: Tensor | None,
    grad_final: Tensor,
) -> tuple[Tensors, Tensors]:
    """Return the gradients of the states after and before each chunk, right to left inside."""
    keep_bnh11 = decay.end().exp()[..., None, None]
    grad_exits, grad_entries = [], []
    for place in reversed(block):
        offset = place - block.start
        grad_exit = walk.at_end(place, carry, grad_final)
        carry = torch.addcmul(own_bnhpr[:, offset], keep_bnh11[:, offset], grad_exit)
        grad_exits.insert(0, grad_exit)
        grad_entries.insert(0, carry)
    return grad_exits, grad_entries


def _states_reversed(
    walk: Walk,
    v_bsmhp: Tensor,
    da_bsh: Tensor,
    b_bsmgr: Tensor,
    initial_bhpr: Tensor,
    scale_bsh: Tensor,
) -> Iterator[tuple[range, Tensors]]:
    """Yield (block, states before its chunks) from the last block to the first."""
    initial = walk.rows(initial_bhpr)

    def advance(block: range, carry: Tensor | None) -> tuple[Tensors, Tensors]:
        decay = k1_ssd_chunk_cumsum(walk.timed(da_bsh, block))
        v = walk.fused(v_bsmhp, block)
        scaled = over_positions(walk.timed(scale_bsh, block), v.shape[2]) * v
        made = k3_ssd_chunk_state(scaled, walk.fused(b_bsmgr, block), decay)
        return _pass_on(walk, block, made, decay, carry, initial)

    span = math.isqrt(len(walk.blocks))
    starts: list[Tensor | None] = []
    carry = None
    last_span = (len(walk.blocks) - 1) // span * span
    for place, block in enumerate(walk.blocks[:last_span]):
        if place % span == 0:
            starts.append(carry)
        carry = advance(block, carry)[1][-1]
    starts.append(carry)
    for first in range(last_span, -1, -span):
        carry = starts.pop()
        refilled = []
        span_blocks = walk.blocks[first : first + span]
        for block in span_blocks:
            if len(block) == 1 and block is span_blocks[-1]:
                # What it leaves behind is already known from the right: only its entry is missing.
                entries = [walk.at_start(block.start, carry, initial)]
            else:
                entries, exits = advance(block, carry)
                carry = exits[-1]
            refilled.append((block, entries))
        while refilled:
            yield refilled.pop()
