"""Walking over chunks one at a time: reading, writing, and where states start and end.

A dense row starts from its initial state and ends in its final one. A packed row does so at every
border. `Walk` hides the difference, so that forward and backward are written once.
"""

import torch
from torch import Tensor

from anymamba.ops.ssd.chunks import Chunks

__all__ = ["Walk"]


class Walk:
    """One walk over the chunks of a sequence; holds no tensor of the sequence itself."""

    def __init__(self, v_bsmhp: Tensor, chunk_len: int, cu_seqlens: Tensor | None) -> None:
        """Cut the sequence of `v_bsmhp` into chunks."""
        self.chunks = Chunks.cut(v_bsmhp, chunk_len, cu_seqlens)
        self.count = self.chunks.count

    def timed(self, x_bsh: Tensor, place: int) -> Tensor:
        """Read (b, l, h) of a chunk; a dense row's last chunk may be short."""
        return self._read(x_bsh, place).to(self.chunks.compute)

    def fused(self, x_bsmhp: Tensor, place: int) -> Tensor:
        """Read (b, f, h, p) of a chunk; a dense row's last chunk may be short."""
        return self._read(x_bsmhp, place).flatten(1, 2).to(self.chunks.compute)

    def buffer(self, x_bs: Tensor) -> Tensor:
        """Make an empty tensor like `x_bs` for `write` to fill."""
        # A packed write adds, so it must start from zero.
        make = torch.empty if self.chunks.table is None else torch.zeros
        return make(x_bs.shape, dtype=x_bs.dtype, device=x_bs.device)

    def write(self, target_bs: Tensor, place: int, piece_bf: Tensor) -> None:
        """Write a chunk, fused or timed, into a buffer; padding is dropped."""
        if target_bs.dim() > piece_bf.dim():
            piece_bf = piece_bf.unflatten(1, (-1, self.chunks.rank))
        table, length = self.chunks.table, self.chunks.length
        if table is None:
            target_bs[:, place * length : (place + 1) * length] = piece_bf
            return
        # Padded slots carry an arbitrary token's index: let them add zero.
        piece_bf = torch.where(self._filled(target_bs, place), piece_bf, 0).to(target_bs.dtype)
        target_bs.index_add_(1, table.token_n_l[place], piece_bf)

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

    def keep_final(self, kept: Tensor, place: int, carry: Tensor) -> Tensor:
        """Store the state after a chunk if a sequence ends there."""
        table = self.chunks.table
        if table is None:
            return carry if place == self.count - 1 else kept
        return self._store(kept, place, carry, table.is_last_n)

    def keep_initial(self, kept: Tensor, place: int, carry: Tensor) -> Tensor:
        """Store the state (or its gradient) before a chunk if a sequence starts there."""
        table = self.chunks.table
        if table is None:
            return carry if place == 0 else kept
        return self._store(kept, place, carry, table.is_first_n)

    def fill_empty(self, kept: Tensor, rows: Tensor) -> Tensor:
        """Give sequences without tokens their row unchanged."""
        table = self.chunks.table
        if table is None:
            return kept
        empty_q111 = (table.last_chunk_q == self.count)[:, None, None, None]
        return torch.where(empty_q111, rows[:-1], kept)

    def _switch(
        self, place: int, carry: Tensor | None, rows: Tensor, border_n: Tensor | None
    ) -> Tensor:
        table = self.chunks.table
        if table is None or border_n is None:
            return rows if carry is None else carry
        row = rows[table.sequence_n[place : place + 1]]
        return row if carry is None else torch.where(border_n[place], row, carry)

    def _store(self, kept: Tensor, place: int, carry: Tensor, border_n: Tensor) -> Tensor:
        assert self.chunks.table is not None
        row = self.chunks.table.sequence_n[place : place + 1].clamp(max=kept.shape[0] - 1)
        return kept.index_copy_(0, row, torch.where(border_n[place], carry, kept[row]))

    def _filled(self, x_bs: Tensor, place: int) -> Tensor:
        assert self.chunks.table is not None
        return self.chunks.table.filled_n_l[place].view(1, -1, *[1] * (x_bs.dim() - 2))

    def _read(self, x_bs: Tensor, place: int) -> Tensor:
        table, length = self.chunks.table, self.chunks.length
        if table is None:
            return x_bs[:, place * length : (place + 1) * length]
        return torch.where(
            self._filled(x_bs, place), x_bs.index_select(1, table.token_n_l[place]), 0
        )
