"""Cutting a sequence into chunks, dense or packed, and putting the output back together."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.ops.numerics import accumulate_dtype
from anymamba.ops.packing import ChunkTable, chunk_table, packing

__all__ = ["Chunks"]


class Chunks(NamedTuple):
    """How a sequence of s tokens is laid out in n chunks of `length` tokens.

    Padding is exact: a padded step has log-decay 0 and value 0, so it neither fades the state nor
    adds to it.
    """

    count: int
    length: int
    rank: int
    compute: torch.dtype
    table: ChunkTable | None  # only for packed sequences

    @classmethod
    def cut(cls, v_bsmhp: Tensor, chunk_len: int, cu_seqlens: Tensor | None) -> "Chunks":
        """Lay out the sequence of `v_bsmhp` in chunks of at most `chunk_len` tokens."""
        batch, sequence, rank = v_bsmhp.shape[:3]
        compute = accumulate_dtype(v_bsmhp.dtype)
        if cu_seqlens is None:
            if sequence <= chunk_len:
                return cls(1, sequence, rank, compute, None)
            if torch.compiler.is_compiling():
                # Always some padding: whole multiples would need a graph of their own.
                return cls(sequence // chunk_len + 1, chunk_len, rank, compute, None)
            return cls(-(-sequence // chunk_len), chunk_len, rank, compute, None)
        pack = packing("ssd_core", cu_seqlens, batch, sequence, v_bsmhp.device)
        # Each sequence pads its last chunk: many short sequences want short chunks.
        length = min(chunk_len, 2 * -(-sequence // pack.count), sequence)
        table = chunk_table(pack, length)
        return cls(table.sequence_n.shape[0], length, rank, compute, table)

    def timed(self, x_bsh: Tensor) -> Tensor:
        """Cut (b, s, h) into (b, n, l, h)."""
        return self._padded(x_bsh).unflatten(1, (self.count, self.length)).to(self.compute)

    def fused(self, x_bsmhp: Tensor) -> Tensor:
        """Cut (b, s, m, h, p) into (b, n, f, h, p)."""
        x_bShp = self._padded(x_bsmhp).flatten(1, 2)
        return x_bShp.unflatten(1, (self.count, self.length * self.rank)).to(self.compute)

    def unfused(self, y_bnfhp: Tensor, v_bsmhp: Tensor) -> Tensor:
        """Put (b, n, f, h, p) together as (b, s, m, h, p), with the dtype and length of v."""
        y_bSmhp = y_bnfhp.flatten(1, 2).unflatten(1, (self.count * self.length, self.rank))
        if self.table is not None:
            y_bSmhp = self.table.gather(y_bSmhp)
        return y_bSmhp[:, : v_bsmhp.shape[1]].to(v_bsmhp.dtype)

    def _padded(self, x_bs: Tensor) -> Tensor:
        if self.table is not None:
            return self.table.spread(x_bs)
        missing = self.count * self.length - x_bs.shape[1]
        return F.pad(x_bs, (0, 0) * (x_bs.dim() - 2) + (0, missing))
