"""The portable selective scan: a chunk of tokens at a time, with a hand-written backward.

Nothing here is recorded by autograd. `scan_forward` and `scan_backward` are the bodies of the
operators in `schema.py`; README 3 and 4 hold the mathematics.

Everything inside a chunk is laid out as (l, b, g, r, e): time first, so that one token is one
contiguous block; channels last, so that dt, u and y (which have no state axis) and B and C (which
have no channel axis) broadcast along whole vectors.
"""

import math

import torch
from torch import Tensor

from anymamba.ops.numerics import accumulate_dtype
from anymamba.ops.packing import ChunkTable, Packing, chunk_table
from anymamba.ops.selective_scan.coefficients import coefficient, grouped, ungrouped
from anymamba.ops.selective_scan.ending import Ending

__all__ = ["scan_backward", "scan_forward"]

# One buffer holds about this many numbers: large enough to hide the cost of a call, small enough
# that the three buffers of the backward stay in a cache.
_BUFFER_ELEMENTS = 2**19
_CHUNK_RANGE = (8, 64)


def scan_forward(
    u_bsi: Tensor,
    dt_bsi: Tensor,
    a_ir: Tensor,
    b: Tensor,
    c: Tensor,
    initial_bir: Tensor,
    skip_i: Tensor,
    z_bsi: Tensor,
    chunk_len: int | None,
    pack: Packing | None,
) -> tuple[Tensor, Tensor]:
    """Compute `y[t] = (sum_r C[t] h[t] + skip u[t]) silu(z[t])` and the final state.

    Args:
        u_bsi: inputs.
        dt_bsi: step sizes.
        a_ir: decay rates.
        b: constant `(i, r)` or grouped `(b, s, g, r)`.
        c: like `b`; where both are grouped, with the same g.
        initial_bir: one row per batch row, or per packed sequence.
        skip_i: weight of the direct path; no channels at all where there is none.
        z_bsi: the gate; no channels at all where there is none.
        chunk_len: tokens per chunk; None chooses by size.
        pack: where tokens belong, for a packed row.

    Returns:
        `y_bsi` in the dtype of u and `final_bir` in the dtype of accumulation.
    """
    scan = _Scan(u_bsi, dt_bsi, a_ir, b, c, chunk_len, pack)
    ending = scan.ending(skip_i, z_bsi)
    rows_qgre = scan.take_rows(initial_bir)
    y_bsi = scan.empty_tokens(u_bsi, u_bsi.dtype)
    y_sbg1e = scan.time_major(y_bsi)
    for place, chunk in enumerate(scan.chunks):
        state_lbgre, _ = scan.advance(chunk, scan.read_row(place, rows_qgre))
        y_sbg1e[chunk] = ending.apply(chunk, scan.c.contract(chunk, state_lbgre))
        scan.write_row(place, rows_qgre, state_lbgre[-1])
    return scan.gather(y_bsi), scan.give_rows(rows_qgre)


def scan_backward(
    grad_y_bsi: Tensor,
    grad_final_bir: Tensor,
    u_bsi: Tensor,
    dt_bsi: Tensor,
    a_ir: Tensor,
    b: Tensor,
    c: Tensor,
    initial_bir: Tensor,
    skip_i: Tensor,
    z_bsi: Tensor,
    chunk_len: int | None,
    pack: Packing | None,
) -> tuple[Tensor, ...]:
    """Compute the gradients of u, dt, a, b, c, the initial state, skip and z (README 4).

    Two passes over the chunks: left to right for the state that enters each chunk, then right to
    left, rebuilding one chunk at a time.
    """
    scan = _Scan(u_bsi, dt_bsi, a_ir, b, c, chunk_len, pack)
    ending = scan.ending(skip_i, z_bsi)
    entry_nbgre = scan.entry_states(initial_bir)
    rows_qgre = scan.take_rows(grad_final_bir)
    grad_y_sbg1e = scan.time_major(scan.spread(grad_y_bsi))
    grad_u_bsi, grad_dt_bsi = (scan.empty_tokens(x, x.dtype) for x in (u_bsi, dt_bsi))
    grad_u_sbg1e, grad_dt_sbg1e = scan.time_major(grad_u_bsi), scan.time_major(grad_dt_bsi)
    grad_a_gre, grad_b, grad_c = (
        torch.zeros_like(scan.a_gre),
        scan.b.new_gradient(),
        scan.c.new_gradient(),
    )
    # Results of a fixed size get a fixed place: allocating them costs as much as computing them.
    q_buffer, part_gre = torch.empty_like(scan.decay_buffer), torch.empty_like(grad_a_gre)
    for place in reversed(range(len(scan.chunks))):
        chunk = scan.chunks[place]
        state_lbgre, x_lbg1e = scan.advance(chunk, scan.state_slots[0].copy_(entry_nbgre[place]))
        length = state_lbgre.shape[0]
        decay_lbgre, previous_lbgre = scan.decay_buffer[:length], scan.state_buffer[:length]
        u_lbg1e, dt_lbg1e = scan.tokens(chunk)
        grad_y_lbg1e = ending.take_back(
            chunk,
            grad_y_sbg1e[chunk].to(scan.compute),
            lambda chunk=chunk, state=state_lbgre: scan.c.contract(chunk, state),
        )
        q_lbgre = scan.c.spread(chunk, grad_y_lbg1e, q_buffer[:length])
        _run_back(scan, place, q_lbgre, rows_qgre)

        scan.c.add_gradient(grad_c, chunk, grad_y_lbg1e, state_lbgre)
        scan.b.add_gradient(grad_b, chunk, x_lbg1e, q_lbgre)
        grad_x_lbg1e = scan.b.contract(chunk, q_lbgre)
        # From here on the decay buffer holds q[t] decay[t] h[t-1], the gradient of dt[t] A, and
        # the buffer of q is free.
        rate_lbgre = decay_lbgre.mul_(q_lbgre).mul_(previous_lbgre)
        torch.mul(rate_lbgre, dt_lbg1e, out=q_lbgre)
        grad_a_gre += torch.sum(q_lbgre, (0, 1), out=part_gre)
        by_rate_lbg1e = torch.mul(rate_lbgre, scan.a_gre, out=q_lbgre).sum(-2, keepdim=True)
        grad_u_sbg1e[chunk] = ending.add_skip(dt_lbg1e * grad_x_lbg1e, grad_y_lbg1e)
        grad_dt_sbg1e[chunk] = by_rate_lbg1e.addcmul_(u_lbg1e, grad_x_lbg1e)
    return (
        scan.gather(grad_u_bsi),
        scan.gather(grad_dt_bsi),
        ungrouped(grad_a_gre).to(a_ir.dtype),
        scan.b.finish(grad_b),
        scan.c.finish(grad_c),
        scan.give_rows(rows_qgre).to(initial_bir.dtype),
        ending.grad_skip(),
        scan.gather(ending.grad_z_bsi),
    )


def _run_back(scan: "_Scan", place: int, q_lbgre: Tensor, rows_qgre: Tensor) -> None:
    """Turn `C[t] grad_y[t]` into q[t], and the row's gradient after the chunk into that before it.

    README 4: `q[t] = C[t] grad_y[t] + decay[t+1] q[t+1]`.
    """
    slots = q_lbgre.unbind(0)
    q_bgre = slots[-1].add_(scan.read_row(place, rows_qgre))
    for step in range(len(slots) - 1, 0, -1):
        q_bgre = slots[step - 1].addcmul_(scan.decay_slots[step], q_bgre)
    torch.mul(scan.decay_slots[0], q_bgre, out=scan.carry_bgre)
    scan.write_row(place, rows_qgre, scan.carry_bgre)


class _Scan:
    """The arguments of one call laid out for work by chunks, and the buffers all chunks share."""

    def __init__(
        self,
        u_bsi: Tensor,
        dt_bsi: Tensor,
        a_ir: Tensor,
        b: Tensor,
        c: Tensor,
        chunk_len: int | None,
        pack: Packing | None,
    ) -> None:
        self.compute = accumulate_dtype(u_bsi.dtype)
        self.groups = next((x.shape[2] for x in (b, c) if x.dim() == 4), 1)
        batch, length, _ = u_bsi.shape
        if chunk_len is None:
            chunk_len = _choose_chunk_len(batch * a_ir.numel())
        self.table: ChunkTable | None = None if pack is None else chunk_table(pack, chunk_len)
        if self.table is not None:
            length = self.table.token_n_l.numel()
        chunk_len = min(chunk_len, length)
        self.length = length
        self.chunks = [
            slice(start, min(start + chunk_len, length)) for start in range(0, length, chunk_len)
        ]
        self.u_sbg1e = self.time_major(self.spread(u_bsi))
        self.dt_sbg1e = self.time_major(self.spread(dt_bsi))
        self.a_gre = grouped(a_ir.to(self.compute), self.groups)
        # exp(x) = 2 ** (x log2 e): torch's exp2 is the faster of the two (README 5).
        self.rate_gre = self.a_gre * math.log2(math.e)
        self.b = coefficient(b, self.compute, self.groups, self.table)
        self.c = coefficient(c, self.compute, self.groups, self.table)
        slot = (batch, *self.a_gre.shape)
        self.decay_buffer = self.a_gre.new_empty(chunk_len, *slot)
        self.state_buffer = self.a_gre.new_empty(chunk_len + 1, *slot)
        self.decay_slots = self.decay_buffer.unbind(0)
        self.state_slots = self.state_buffer.unbind(0)
        self.carry_bgre = torch.empty_like(self.decay_slots[0])

    def ending(self, skip_i: Tensor, z_bsi: Tensor) -> Ending:
        """Lay skip and gate out; either has no channels where there is none."""
        z_bsi = self.spread(z_bsi)
        grad_z_bsi = self.empty_tokens(z_bsi, z_bsi.dtype)
        return Ending(skip_i, z_bsi, grad_z_bsi, self.u_sbg1e, self.compute, self.time_major)

    def advance(self, chunk: slice, entry_bgre: Tensor) -> tuple[Tensor, Tensor]:
        """Fill the buffers with a chunk's decays and states; return the states and dt u."""
        length = chunk.stop - chunk.start
        u_lbg1e, dt_lbg1e = self.tokens(chunk)
        torch.mul(dt_lbg1e, self.rate_gre, out=self.decay_buffer[:length]).exp2_()
        state_lbgre = self.state_buffer[1 : length + 1]
        x_lbg1e = dt_lbg1e * u_lbg1e
        self.b.spread(chunk, x_lbg1e, state_lbgre)
        state_bgre = entry_bgre
        for step in range(length):
            state_bgre = self.state_slots[step + 1].addcmul_(self.decay_slots[step], state_bgre)
        return state_lbgre, x_lbg1e

    def entry_states(self, initial_bir: Tensor) -> Tensor:
        """Return the state that enters each chunk, (n, b, g, r, e)."""
        rows_qgre = self.take_rows(initial_bir)
        entry_nbgre = self.a_gre.new_empty(len(self.chunks), *self.state_slots[0].shape)
        for place, chunk in enumerate(self.chunks):
            entry_nbgre[place] = self.read_row(place, rows_qgre)
            if place + 1 < len(self.chunks):
                state_lbgre, _ = self.advance(chunk, entry_nbgre[place])
                self.write_row(place, rows_qgre, state_lbgre[-1])
        return entry_nbgre

    def tokens(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return u and dt of a chunk, (l, b, g, 1, e)."""
        return self.u_sbg1e[chunk].to(self.compute), self.dt_sbg1e[chunk].to(self.compute)

    def time_major(self, x_bsi: Tensor) -> Tensor:
        """View (b, s, i) as (s, b, g, 1, e)."""
        return x_bsi.transpose(0, 1).unflatten(2, (self.groups, 1, -1))

    def empty_tokens(self, like_bsi: Tensor, dtype: torch.dtype) -> Tensor:
        batch, _, channels = like_bsi.shape
        return torch.empty(batch, self.length, channels, dtype=dtype, device=like_bsi.device)

    def spread(self, x_bs: Tensor) -> Tensor:
        return x_bs if self.table is None else self.table.spread(x_bs)

    def gather(self, x_bs: Tensor) -> Tensor:
        return x_bs if self.table is None else self.table.gather(x_bs)

    # One table holds the state of every row. A chunk reads the row of its sequence and writes it
    # back, so sequences cannot meet, and an empty one keeps its row. Chunks nobody needs own the
    # extra row at the end.

    def take_rows(self, x_bir: Tensor) -> Tensor:
        rows_qgre = grouped(x_bir.to(self.compute), self.groups)
        if self.table is None:
            return rows_qgre.clone()
        return torch.cat([rows_qgre, torch.zeros_like(rows_qgre[:1])])

    def give_rows(self, rows_qgre: Tensor) -> Tensor:
        return ungrouped(rows_qgre if self.table is None else rows_qgre[:-1])

    def read_row(self, place: int, rows_qgre: Tensor) -> Tensor:
        if self.table is None:
            return rows_qgre
        return rows_qgre.index_select(0, self.table.sequence_n[place : place + 1])

    def write_row(self, place: int, rows_qgre: Tensor, row_bgre: Tensor) -> None:
        if self.table is None:
            rows_qgre.copy_(row_bgre)
        else:
            rows_qgre.index_copy_(0, self.table.sequence_n[place : place + 1], row_bgre)


def _choose_chunk_len(token_elements: int) -> int:
    low, high = _CHUNK_RANGE
    return max(low, min(high, _BUFFER_ELEMENTS // token_elements))
