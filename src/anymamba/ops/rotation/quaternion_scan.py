"""The running product of quaternions as the operator `anymamba::quaternion_scan`.

    cum[t] = q[t] (x) ... (x) q[1] (x) initial

Tokens are cut into chunks of length l that each belong to one sequence. Inside, a tensor has the
layout `4clx`: component, chunk, place in the chunk, everything else (heads and blocks). All chunks
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
    sequence_c: Tensor
    is_first_c: Tensor
    is_last_c: Tensor
    first_q: Tensor  # chunk that opens each sequence; any chunk for empty ones
    last_q: Tensor
    is_empty_q: Tensor
    table: ChunkTable | None  # for packed rows

    def lay_out(self, x_bshj4: Tensor, scalar: float) -> Tensor:
        """View or copy (b, s, h, j, 4) as `4clx`; padding becomes (scalar, 0, 0, 0)."""
        length = x_bshj4.shape[1]
        if self.table is not None:
            x_bshj4 = self.table.spread(x_bshj4)
            filled_s = self.table.filled_n_l.flatten()
            x_bshj4[..., 0].masked_fill_(~filled_s.view(1, -1, 1, 1), scalar)
        elif length % self.chunk_len:
            extra = -length % self.chunk_len
            x_bshj4 = F.pad(x_bshj4, (0, 0, 0, 0, 0, 0, 0, extra))
            x_bshj4[:, length:, ..., 0] = scalar
        return x_bshj4.reshape(self.sequence_c.shape[0], self.chunk_len, -1, 4).movedim(-1, 0)

    def take_back(self, x_4clx: Tensor, like_bshj4: Tensor) -> Tensor:
        """Undo `lay_out`."""
        b, s, *inner = like_bshj4.shape
        x_bshj4 = x_4clx.movedim(0, -1).reshape(b, -1, *inner)
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
    chunk_c = torch.arange(rows * depth, device=device)
    place_c = chunk_c % depth
    first_q = torch.arange(rows, device=device) * depth
    return _Plan(
        chunk_len=chunk_len,
        depth=depth,
        sequence_c=chunk_c // depth,
        is_first_c=place_c == 0,
        is_last_c=place_c == depth - 1,
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
        sequence_c=table.sequence_n.clamp(max=pack.count - 1),
        is_first_c=table.is_first_n,
        is_last_c=table.is_last_n,
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


def _chunk_starts(q_4clx: Tensor, initial_4qx: Tensor, plan: _Plan) -> Tensor:
    """Return the running product before each chunk (README 3)."""
    initial_4cx = initial_4qx.index_select(1, plan.sequence_c)
    if plan.depth == 1:
        return initial_4cx
    end_4cx = q_4clx[:, :, 0].clone(memory_format=torch.contiguous_format)
    # Two buffers take turns: fresh memory for every place would cost more than the products.
    step_4cx, spare_4cx = torch.empty_like(end_4cx), torch.empty_like(end_4cx)
    for place in range(1, plan.chunk_len):
        step_4cx.copy_(q_4clx[:, :, place])
        end_4cx, spare_4cx = _multiply(step_4cx, end_4cx, spare_4cx), end_4cx
    for offset in _offsets(plan.depth):
        is_same = (plan.sequence_c[offset:] == plan.sequence_c[:-offset])[:, None]
        joined = _multiply(end_4cx[:, offset:], end_4cx[:, :-offset])
        later = torch.where(is_same, joined, end_4cx[:, offset:])
        end_4cx = torch.cat([end_4cx[:, :offset], later], 1)
    start_4cx = _multiply(end_4cx.roll(1, 1), initial_4cx)
    return torch.where(plan.is_first_c[:, None], initial_4cx, start_4cx)


def _rows_first(x_qhj4: Tensor) -> Tensor:
    return x_qhj4.flatten(1, 2).movedim(-1, 0).contiguous()


def _forward(increment_bshj4: Tensor, initial_qhj4: Tensor, cu_seqlens: Tensor | None) -> Any:
    plan = _plan(increment_bshj4, cu_seqlens)
    q_4clx = plan.lay_out(increment_bshj4, 1.0)
    cum_4cx = _chunk_starts(q_4clx, _rows_first(initial_qhj4), plan)
    cum_4clx = torch.empty_like(q_4clx.movedim(0, -1)).movedim(-1, 0)
    step_4cx, spare_4cx = torch.empty_like(cum_4cx), torch.empty_like(cum_4cx)
    for place in range(plan.chunk_len):
        step_4cx.copy_(q_4clx[:, :, place])
        cum_4cx, spare_4cx = _multiply(step_4cx, cum_4cx, spare_4cx), cum_4cx
        cum_4clx[:, :, place] = cum_4cx
    last_qhj4 = cum_4cx.index_select(1, plan.last_q).movedim(0, -1).reshape(initial_qhj4.shape)
    final_qhj4 = torch.where(plan.is_empty_q[:, None, None, None], initial_qhj4, last_qhj4)
    return plan.take_back(cum_4clx, increment_bshj4), final_qhj4


def _chunk_gradients(
    grad_4clx: Tensor, q_4clx: Tensor, grad_final_4cx: Tensor, plan: _Plan
) -> Tensor:
    """Return the gradient of the running product before each chunk (README 4)."""
    start_4cx = grad_final_4cx.clone()
    step_4cx, spare_4cx = torch.empty_like(start_4cx), torch.empty_like(start_4cx)
    span_4cx, other_4cx = torch.empty_like(start_4cx), torch.empty_like(start_4cx)
    for place in reversed(range(plan.chunk_len)):
        step_4cx.copy_(q_4clx[:, :, place])
        start_4cx += grad_4clx[:, :, place]
        _multiply(step_4cx, start_4cx, spare_4cx, conjugate_a=True)
        start_4cx, spare_4cx = spare_4cx, start_4cx
        if place + 1 == plan.chunk_len:
            span_4cx.copy_(step_4cx)
        else:
            span_4cx, other_4cx = _multiply(span_4cx, step_4cx, other_4cx), span_4cx
    for offset in _offsets(plan.depth):
        is_same = (plan.sequence_c[offset:] == plan.sequence_c[:-offset])[:, None]
        early, late = span_4cx[:, :-offset], span_4cx[:, offset:]
        moved = _multiply(early, start_4cx[:, offset:], conjugate_a=True)
        start = start_4cx[:, :-offset] + torch.where(is_same, moved, torch.zeros_like(moved))
        span = torch.where(is_same, _multiply(late, early), early)
        start_4cx = torch.cat([start, start_4cx[:, -offset:]], 1)
        span_4cx = torch.cat([span, span_4cx[:, -offset:]], 1)
    return start_4cx


def _backward(
    grad_cum_bshj4: Tensor,
    grad_final_qhj4: Tensor,
    increment_bshj4: Tensor,
    initial_qhj4: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    plan = _plan(increment_bshj4, cu_seqlens)
    q_4clx = plan.lay_out(increment_bshj4, 1.0)
    grad_4clx = plan.lay_out(grad_cum_bshj4, 0.0)
    # Each slot first holds the product before its token, then that token's gradient.
    out_4clx = torch.empty_like(q_4clx.movedim(0, -1)).movedim(-1, 0)
    cum_4cx = _chunk_starts(q_4clx, _rows_first(initial_qhj4), plan)
    step_4cx, spare_4cx = torch.empty_like(cum_4cx), torch.empty_like(cum_4cx)
    for place in range(plan.chunk_len):
        out_4clx[:, :, place] = cum_4cx
        step_4cx.copy_(q_4clx[:, :, place])
        cum_4cx, spare_4cx = _multiply(step_4cx, cum_4cx, spare_4cx), cum_4cx

    is_last = plan.is_last_c[:, None]
    final_4cx = _rows_first(grad_final_qhj4).index_select(1, plan.sequence_c)
    final_4cx = torch.where(is_last, final_4cx, torch.zeros_like(final_4cx))
    start_4cx = _chunk_gradients(grad_4clx, q_4clx, final_4cx, plan)
    carry_4cx = torch.where(is_last, final_4cx, start_4cx.roll(-1, 1))
    before_4cx = cum_4cx
    for place in reversed(range(plan.chunk_len)):
        carry_4cx += grad_4clx[:, :, place]
        before_4cx.copy_(out_4clx[:, :, place])
        out_4clx[:, :, place] = _multiply(carry_4cx, before_4cx, spare_4cx, conjugate_b=True)
        step_4cx.copy_(q_4clx[:, :, place])
        _multiply(step_4cx, carry_4cx, spare_4cx, conjugate_a=True)
        carry_4cx, spare_4cx = spare_4cx, carry_4cx

    first_qhj4 = start_4cx.index_select(1, plan.first_q).movedim(0, -1).reshape(initial_qhj4.shape)
    is_empty = plan.is_empty_q[:, None, None, None]
    grad_initial_qhj4 = torch.where(is_empty, grad_final_qhj4, first_qhj4)
    return plan.take_back(out_4clx, increment_bshj4), grad_initial_qhj4


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
