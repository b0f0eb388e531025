"""The running product of quaternions as the operator `anymamba::quaternion_scan`.

    cum[t] = q[t] (x) ... (x) q[1] (x) initial

Tokens are cut into chunks of length l that each belong to one sequence. Inside, a tensor has the
layout `4nlH`: component, chunk, place in the chunk, heads times blocks. All chunks
advance together, one place at a time, so a place is a handful of long vector operations.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.ops.boundary import Operator
from anymamba.ops.packing import ChunkTable, Packing, chunk_table, packing
from anymamba.ops.rotation.quaternion import product_into, quaternion_multiply

__all__ = ["quaternion_scan"]

_WHERE = "cumulate_quaternions"
# README 6: rows up to this length are cut into chunks of that length; longer ones into the last.
_CHUNK_LENGTHS = ((512, 8), (4096, 16))
_LONGEST_CHUNK = 32


class _Plan(NamedTuple):
    """Which chunk belongs to whom. Chunks of one sequence are neighbours, oldest first."""

    chunk_len: int
    depth: int  # no sequence has more chunks than this
    sequence_n: Tensor
    is_first_n: Tensor
    is_last_n: Tensor
    first_q: Tensor  # chunk that opens each sequence; any chunk for empty ones
    last_q: Tensor
    is_empty_q: Tensor
    table: ChunkTable | None  # for packed rows

    def lay_out(self, x_bshj4: Tensor, scalar: float) -> Tensor:
        """View or copy (b, s, h, j, 4) as `4nlH`; padding becomes (scalar, 0, 0, 0)."""
        length = x_bshj4.shape[1]
        if self.table is not None:
            x_bshj4 = self.table.spread(x_bshj4)
            filled_s = self.table.filled_n_l.flatten()
            x_bshj4[..., 0].masked_fill_(~filled_s.view(1, -1, 1, 1), scalar)
        elif length % self.chunk_len:
            extra = -length % self.chunk_len
            x_bshj4 = F.pad(x_bshj4, (0, 0, 0, 0, 0, 0, 0, extra))
            x_bshj4[:, length:, ..., 0] = scalar
        return x_bshj4.reshape(self.sequence_n.shape[0], self.chunk_len, -1, 4).movedim(-1, 0)

    def take_back(self, x_4nlH: Tensor, like_bshj4: Tensor) -> Tensor:
        """Undo `lay_out`."""
        b, s, *inner = like_bshj4.shape
        x_bshj4 = x_4nlH.movedim(0, -1).reshape(b, -1, *inner)
        if self.table is not None:
            return self.table.gather(x_bshj4)
        return x_bshj4[:, :s].contiguous()


def _chunk_len(length: int) -> int:
    return next((chunk for row, chunk in _CHUNK_LENGTHS if length <= row), _LONGEST_CHUNK)


def _dense_plan(rows: int, length: int, device: torch.device) -> _Plan:
    depth = -(-length // _chunk_len(length))
    # Even chunks: the padding is less than one place per chunk.
    chunk_len = -(-length // depth)
    depth = -(-length // chunk_len)
    chunk_n = torch.arange(rows * depth, device=device)
    place_n = chunk_n % depth
    first_q = torch.arange(rows, device=device) * depth
    return _Plan(
        chunk_len=chunk_len,
        depth=depth,
        sequence_n=chunk_n // depth,
        is_first_n=place_n == 0,
        is_last_n=place_n == depth - 1,
        first_q=first_q,
        last_q=first_q + depth - 1,
        is_empty_q=torch.zeros_like(first_q, dtype=torch.bool),
        table=None,
    )


def _packed_plan(pack: Packing, length: int) -> _Plan:
    chunk_len = min(_chunk_len(length), length)
    table = chunk_table(pack, chunk_len)
    chunks = table.sequence_n.shape[0]
    sequence_q = torch.arange(pack.count, device=table.sequence_n.device)
    return _Plan(
        chunk_len=chunk_len,
        depth=min(chunks, -(-length // chunk_len)),
        sequence_n=table.sequence_n.clamp(max=pack.count - 1),
        is_first_n=table.is_first_n,
        is_last_n=table.is_last_n,
        first_q=torch.searchsorted(table.sequence_n, sequence_q).clamp(max=chunks - 1),
        last_q=table.last_chunk_q.clamp(max=chunks - 1),
        is_empty_q=pack.length_q == 0,
        table=table,
    )


def _plan(increment_bshj4: Tensor, cu_seqlens: Tensor | None) -> _Plan:
    b, s = increment_bshj4.shape[:2]
    if cu_seqlens is None:
        return _dense_plan(b, s, increment_bshj4.device)
    return _packed_plan(packing(_WHERE, cu_seqlens, b, s, increment_bshj4.device), s)


def _multiply(a_4: Tensor, b_4: Tensor, out: Tensor | None = None, **conjugate: bool) -> Tensor:
    if out is None:
        out = torch.empty_like(b_4, memory_format=torch.contiguous_format)
    product_into(out, a_4, b_4, **conjugate)
    return out


def _offsets(depth: int) -> Iterator[int]:
    offset = 1
    while offset < depth:
        yield offset
        offset *= 2


def _chunk_starts(q_4nlH: Tensor, initial_4qH: Tensor, plan: _Plan) -> Tensor:
    """Return the running product before each chunk (README 3)."""
    initial_4nH = initial_4qH.index_select(1, plan.sequence_n)
    if plan.depth == 1:
        return initial_4nH
    end_4nH = q_4nlH[:, :, 0].clone(memory_format=torch.contiguous_format)
    # Two buffers take turns: fresh memory for every place would cost more than the products.
    step_4nH, spare_4nH = torch.empty_like(end_4nH), torch.empty_like(end_4nH)
    for place in range(1, plan.chunk_len):
        step_4nH.copy_(q_4nlH[:, :, place])
        end_4nH, spare_4nH = _multiply(step_4nH, end_4nH, spare_4nH), end_4nH
    for offset in _offsets(plan.depth):
        is_same = (plan.sequence_n[offset:] == plan.sequence_n[:-offset])[:, None]
        joined = _multiply(end_4nH[:, offset:], end_4nH[:, :-offset])
        later = torch.where(is_same, joined, end_4nH[:, offset:])
        end_4nH = torch.cat([end_4nH[:, :offset], later], 1)
    start_4nH = _multiply(end_4nH.roll(1, 1), initial_4nH)
    return torch.where(plan.is_first_n[:, None], initial_4nH, start_4nH)


def _rows_first(x_qhj4: Tensor) -> Tensor:
    return x_qhj4.flatten(1, 2).movedim(-1, 0).contiguous()


def _forward(increment_bshj4: Tensor, initial_qhj4: Tensor, cu_seqlens: Tensor | None) -> Any:
    plan = _plan(increment_bshj4, cu_seqlens)
    q_4nlH = plan.lay_out(increment_bshj4, 1.0)
    cum_4nH = _chunk_starts(q_4nlH, _rows_first(initial_qhj4), plan)
    cum_4nlH = torch.empty_like(q_4nlH.movedim(0, -1)).movedim(-1, 0)
    step_4nH, spare_4nH = torch.empty_like(cum_4nH), torch.empty_like(cum_4nH)
    for place in range(plan.chunk_len):
        step_4nH.copy_(q_4nlH[:, :, place])
        cum_4nH, spare_4nH = _multiply(step_4nH, cum_4nH, spare_4nH), cum_4nH
        cum_4nlH[:, :, place] = cum_4nH
    last_qhj4 = cum_4nH.index_select(1, plan.last_q).movedim(0, -1).reshape(initial_qhj4.shape)
    final_qhj4 = torch.where(plan.is_empty_q[:, None, None, None], initial_qhj4, last_qhj4)
    return plan.take_back(cum_4nlH, increment_bshj4), final_qhj4.contiguous()


def _chunk_gradients(
    grad_4nlH: Tensor, q_4nlH: Tensor, grad_final_4nH: Tensor, plan: _Plan
) -> Tensor:
    """Return the gradient of the running product before each chunk (README 4)."""
    start_4nH = grad_final_4nH.clone()
    step_4nH, spare_4nH = torch.empty_like(start_4nH), torch.empty_like(start_4nH)
    span_4nH, other_4nH = torch.empty_like(start_4nH), torch.empty_like(start_4nH)
    for place in reversed(range(plan.chunk_len)):
        step_4nH.copy_(q_4nlH[:, :, place])
        start_4nH += grad_4nlH[:, :, place]
        _multiply(step_4nH, start_4nH, spare_4nH, conjugate_a=True)
        start_4nH, spare_4nH = spare_4nH, start_4nH
        if place + 1 == plan.chunk_len:
            span_4nH.copy_(step_4nH)
        else:
            span_4nH, other_4nH = _multiply(span_4nH, step_4nH, other_4nH), span_4nH
    for offset in _offsets(plan.depth):
        is_same = (plan.sequence_n[offset:] == plan.sequence_n[:-offset])[:, None]
        early, late = span_4nH[:, :-offset], span_4nH[:, offset:]
        moved = _multiply(early, start_4nH[:, offset:], conjugate_a=True)
        start = start_4nH[:, :-offset] + torch.where(is_same, moved, torch.zeros_like(moved))
        span = torch.where(is_same, _multiply(late, early), early)
        start_4nH = torch.cat([start, start_4nH[:, -offset:]], 1)
        span_4nH = torch.cat([span, span_4nH[:, -offset:]], 1)
    return start_4nH


def _backward(
    grad_cum_bshj4: Tensor,
    grad_final_qhj4: Tensor,
    increment_bshj4: Tensor,
    initial_qhj4: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    plan = _plan(increment_bshj4, cu_seqlens)
    q_4nlH = plan.lay_out(increment_bshj4, 1.0)
    grad_4nlH = plan.lay_out(grad_cum_bshj4, 0.0)
    # Each slot first holds the product before its token, then that token's gradient.
    out_4nlH = torch.empty_like(q_4nlH.movedim(0, -1)).movedim(-1, 0)
    cum_4nH = _chunk_starts(q_4nlH, _rows_first(initial_qhj4), plan)
    step_4nH, spare_4nH = torch.empty_like(cum_4nH), torch.empty_like(cum_4nH)
    for place in range(plan.chunk_len):
        out_4nlH[:, :, place] = cum_4nH
        step_4nH.copy_(q_4nlH[:, :, place])
        cum_4nH, spare_4nH = _multiply(step_4nH, cum_4nH, spare_4nH), cum_4nH

    is_last = plan.is_last_n[:, None]
    final_4nH = _rows_first(grad_final_qhj4).index_select(1, plan.sequence_n)
    final_4nH = torch.where(is_last, final_4nH, torch.zeros_like(final_4nH))
    start_4nH = _chunk_gradients(grad_4nlH, q_4nlH, final_4nH, plan)
    carry_4nH = torch.where(is_last, final_4nH, start_4nH.roll(-1, 1))
    before_4nH = cum_4nH
    for place in reversed(range(plan.chunk_len)):
        carry_4nH += grad_4nlH[:, :, place]
        before_4nH.copy_(out_4nlH[:, :, place])
        out_4nlH[:, :, place] = _multiply(carry_4nH, before_4nH, spare_4nH, conjugate_b=True)
        step_4nH.copy_(q_4nlH[:, :, place])
        _multiply(step_4nH, carry_4nH, spare_4nH, conjugate_a=True)
        carry_4nH, spare_4nH = spare_4nH, carry_4nH

    first_qhj4 = start_4nH.index_select(1, plan.first_q).movedim(0, -1).reshape(initial_qhj4.shape)
    is_empty = plan.is_empty_q[:, None, None, None]
    grad_initial_qhj4 = torch.where(is_empty, grad_final_qhj4, first_qhj4)
    return plan.take_back(out_4nlH, increment_bshj4), grad_initial_qhj4


def _fake(increment_bshj4: Tensor, initial_qhj4: Tensor, cu_seqlens: Tensor | None) -> Any:
    return (
        torch.empty_like(increment_bshj4, memory_format=torch.contiguous_format),
        torch.empty_like(initial_qhj4, memory_format=torch.contiguous_format),
    )


def _composite(increment_bshj4: Tensor, initial_qhj4: Tensor, cu_seqlens: Tensor | None) -> Any:
    """Compute the same values by doubling, from differentiable functions."""
    b, s = increment_bshj4.shape[:2]
    device = increment_bshj4.device
    pack = None if cu_seqlens is None else packing(_WHERE, cu_seqlens, b, s, device)
    position_s = torch.arange(s, device=device) if pack is None else pack.position_s
    identity_4 = (torch.arange(4, device=device) == 0).to(increment_bshj4.dtype)
    cum = increment_bshj4
    for offset in _offsets(s):
        is_inside = (position_s[offset:] >= offset)[:, None, None, None]
        earlier = torch.where(is_inside, cum[:, :-offset], identity_4)
        cum = torch.cat([cum[:, :offset], quaternion_multiply(cum[:, offset:], earlier)], 1)
    if pack is None:
        cum = quaternion_multiply(cum, initial_qhj4.unsqueeze(1))
        return cum, cum[:, -1].clone()
    cum = quaternion_multiply(cum, initial_qhj4.index_select(0, pack.sequence_s).unsqueeze(0))
    return cum, pack.last(cum, initial_qhj4)


def _merge_axes(cu_seqlens: Tensor | None) -> tuple[tuple[int, int], tuple[int, int]]:
    # A packed row has batch 1 and its rows are sequences, but heads are independent either way.
    axes = (0, 0) if cu_seqlens is None else (2, 1)
    return axes, axes


quaternion_scan = Operator(
    "quaternion_scan",
    tensors=("increment", "initial"),
    constants="Tensor? cu_seqlens",
    outputs=2,
    forward=_forward,
    backward=_backward,
    fake=_fake,
    composite=_composite,
    merge_axes=_merge_axes,
    merge_constants=lambda size, tensors, constants: constants,
)
