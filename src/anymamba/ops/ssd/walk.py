"""Walking over a sequence in blocks of chunks: reading, writing, and where states start and end.

A block is as many chunks as fit a budget: one where chunks are large, so that nothing larger than
a chunk's matrix exists, many where they are small, so that a call per chunk does not dominate.

A dense row starts from its initial state and ends in its final one. A packed row does so at every
border. `Walk` hides the difference, so that forward and backward are written once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from anymamba.ops.ssd.chunks import Chunks

__all__ = ["Walk"]

# Elements of a block's (h, f, f) matrices: 1 MB of float32, which a core's cache holds.
BLOCK_ELEMENTS = 2**18


class Walk:
    """One walk over the chunks of a sequence; holds no tensor of the sequence itself."""

    def __init__(self, v_bsmhp: Tensor, chunk_len: int, cu_seqlens: Tensor | None) -> None:
        """Cut the sequence of `v_bsmhp` into chunks, and the chunks into blocks."""
        self.chunks = Chunks.cut(v_bsmhp, chunk_len, cu_seqlens)
        batch, sequence, rank, heads = v_bsmhp.shape[:4]
        per_chunk = batch * heads * (self.chunks.length * rank) ** 2
        per_block = max(1, BLOCK_ELEMENTS // per_chunk)
        # A dense row's last chunk may be short: it is a block of its own, so that the others can
        # be views of equal chunks.
        whole = self.chunks.count
        if self.chunks.table is None and sequence % self.chunks.length:
            whole -= 1
        self.blocks = [
            range(start, min(start + per_block, whole)) for start in range(0, whole, per_block)
        ]
        if whole < self.chunks.count:
            self.blocks.append(range(whole, self.chunks.count))

    def timed(self, x_bsh: Tensor, block: range) -> Tensor:
        """Read (b, n, l, h) of a block."""
        return self._read(x_bsh, block).to(self.chunks.compute)

    def fused(self, x_bsmhp: Tensor, block: range) -> Tensor:
        """Read (b, n, f, h, p) of a block."""
        return self._read(x_bsmhp, block).flatten(2, 3).to(self.chunks.compute)

    def buffer(self, x_bs: Tensor) -> Tensor:
        """Make an empty tensor like `x_bs` for `write` to fill."""
        # A packed write adds, so it must start from zero.
        make = torch.empty if self.chunks.table is None else torch.zeros
        return make(x_bs.shape, dtype=x_bs.dtype, device=x_bs.device)

    def write(self, target_bs: Tensor, block: range, piece_bnf: Tensor) -> None:
        """Write a block, fused or timed, into a buffer; padding is dropped."""
        piece_bS = piece_bnf.flatten(1, 2)
        if target_bs.dim() > piece_bS.dim():
            piece_bS = piece_bS.unflatten(1, (-1, self.chunks.rank))
        table = self.chunks.table
        if table is None:
            target_bs[:, self._tokens(block)] = piece_bS
            return
        # Padded slots carry an arbitrary token's index: let them add zero.
        piece_bS = torch.where(self._filled(target_bs, block), piece_bS, 0).to(target_bs.dtype)
        target_bs.index_add_(1, table.token_n_l[block.start : block.stop].flatten(), piece_bS)

    def rows(self, state_bhpr: Tensor) -> Tensor:
        """Prepare states of rows or sequences for `at_start` and `at_end`."""
        state_bhpr = state_bhpr.to(self.chunks.compute)
        if self.chunks.table is None:
            return state_bhpr
        # One spare row serves the chunks that no sequence needs.
        return torch.cat([state_bhpr, torch.zeros_like(state_bhpr[:1])])

    def at_start(self, place: int, carry: Tensor | None, rows: Tensor) -> Tensor:
        """Return the carry, or the row that belongs where a sequence starts at this chunk."""
        table = self.chunks.table
        return self._switch(place, carry, rows, None if table is None else table.is_first_n)

    def at_end(self, place: int, carry: Tensor | None, rows: Tensor) -> Tensor:
        """Return the carry, or the row that belongs where a sequence ends at this chunk."""
        table = self.chunks.table
        return self._switch(place, carry, rows, None if table is None else table.is_last_n)

    def keep_finals(self, kept: Tensor, block: range, exits: Sequence[Tensor]) -> Tensor:
        """Store the states after a block's chunks where sequences end."""
        table = self.chunks.table
        if table is None:
            return exits[-1] if block.stop == self.chunks.count else kept
        return self._store(kept, block, exits, table.is_last_n)

    def keep_initials(self, kept: Tensor, block: range, entries: Sequence[Tensor]) -> Tensor:
        """Store states (or their gradients) before a block's chunks where sequences start."""
        table = self.chunks.table
        if table is None:
            return entries[0] if block.start == 0 else kept
        return self._store(kept, block, entries, table.is_first_n)

    def fill_empty(self, kept: Tensor, rows: Tensor) -> Tensor:
        """Give sequences without tokens their row unchanged."""
        table = self.chunks.table
        if table is None:
            return kept
        empty_q111 = (table.last_chunk_q == self.chunks.count)[:, None, None, None]
        return torch.where(empty_q111, rows[:-1], kept)

    def _switch(
        self, place: int, carry: Tensor | None, rows: Tensor, border_n: Tensor | None
    ) -> Tensor:
        table = self.chunks.table
        if table is None or border_n is None:
            return rows if carry is None else carry
        row = rows[table.sequence_n[place : place + 1]]
        return row if carry is None else torch.where(border_n[place], row, carry)

    def _store(
        self, kept: Tensor, block: range, states: Sequence[Tensor], border_n: Tensor
    ) -> Tensor:
        """Add each state that stands at a border to its sequence's row, which is still zero."""
        assert self.chunks.table is not None
        here = slice(block.start, block.stop)
        row_n = self.chunks.table.sequence_n[here].clamp(max=kept.shape[0] - 1)
        state_nhpr = torch.cat(list(states))
        state_nhpr = torch.where(border_n[here, None, None, None], state_nhpr, 0)
        return kept.index_add_(0, row_n, state_nhpr)

    def _tokens(self, block: range) -> slice:
        return slice(block.start * self.chunks.length, block.stop * self.chunks.length)

    def _filled(self, x_bs: Tensor, block: range) -> Tensor:
        assert self.chunks.table is not None
        filled = self.chunks.table.filled_n_l[block.start : block.stop]
        return filled.view(1, -1, *[1] * (x_bs.dim() - 2))

    def _read(self, x_bs: Tensor, block: range) -> Tensor:
        table = self.chunks.table
        if table is None:
            return x_bs[:, self._tokens(block)].unflatten(1, (len(block), -1))
        index = table.token_n_l[block.start : block.stop].flatten()
        read_bS = torch.where(self._filled(x_bs, block), x_bs.index_select(1, index), 0)
        return read_bS.unflatten(1, (len(block), -1))
