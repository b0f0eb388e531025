"""Which part of a row a rank holds, and how its packed sequences meet those of its neighbours."""

from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.errors import CacheError, DtypeError, PackingError
from anymamba.ops import segment_rows

__all__ = ["Shard", "dense_shard", "packed_shard", "reject_packed_cache"]


class Shard(NamedTuple):
    """This rank's tokens. Packed rows are run as one row of all tokens, one state per segment.

    Attributes:
        batch: rows.
        length: tokens of a row here.
        continues_b: whether a row's first segment began on an earlier rank.
        carries_b: whether the state that comes in also goes out: one segment, begun earlier.
        cu_seqlens: borders of the segments, rows one after the other; None without packing.
        first_b: the segment that opens each row; None without packing.
        last_b: the segment that closes each row; None without packing.
        opens_bs: whether a token belongs to the first segment; None without packing.
        closes_bs: whether a token belongs to the last segment; None without packing.
        seen_q: tokens of each segment's sequence so far, those on earlier ranks included.
    """

    batch: int
    length: int
    continues_b: Tensor
    carries_b: Tensor
    cu_seqlens: Tensor | None = None
    first_b: Tensor | None = None
    last_b: Tensor | None = None
    opens_bs: Tensor | None = None
    closes_bs: Tensor | None = None
    seen_q: Tensor | None = None

    def rows(self, x: Tensor) -> Tensor:
        """Return tokens as (batch, sequence, ...)."""
        return x if self.cu_seqlens is None else x.reshape(self.batch, self.length, *x.shape[2:])

    def enter(self, fresh_q: Tensor, incoming_b: Tensor) -> Tensor:
        """Return the states to start from: what comes in where a row continues, else the fresh."""
        incoming_b = incoming_b.to(fresh_q.dtype)
        if self.first_b is None:
            return torch.where(_column(self.continues_b, fresh_q), incoming_b, fresh_q)
        first_b = fresh_q.index_select(0, self.first_b)
        start_b = torch.where(_column(self.continues_b, first_b), incoming_b, first_b)
        return fresh_q.index_copy(0, self.first_b, start_b)

    def add(self, state_q: Tensor, more_b: Tensor) -> Tensor:
        """Add to the state of each row's first segment."""
        if self.first_b is None:
            return state_q + more_b
        return state_q.index_add(0, self.first_b, more_b)

    def leave(self, state_q: Tensor) -> Tensor:
        """Return the state that each row hands on."""
        return state_q if self.last_b is None else state_q.index_select(0, self.last_b)

    def opening(self, x_bs: Tensor) -> Tensor:
        """Return (batch, sequence, ...) with zeros behind the first segment."""
        return x_bs if self.opens_bs is None else torch.where(_column(self.opens_bs, x_bs), x_bs, 0)

    def tail(self, x: Tensor, width: int) -> Tensor:
        """Return the last tokens of each row, (batch, channels, width), of its last segment."""
        tail_bkv = self.rows(x)[:, -width:]
        if self.closes_bs is not None:
            tail_bkv = torch.where(self.closes_bs[:, -width:, None], tail_bkv, 0)
        return tail_bkv.transpose(1, 2)


def _column(flag: Tensor, like: Tensor) -> Tensor:
    return flag.view(*flag.shape, *[1] * (like.dim() - flag.dim()))


def dense_shard(u_bsd: Tensor, rank: int) -> Shard:
    """Return the shard of rows that are one sequence each."""
    continues_b = torch.full((u_bsd.shape[0],), rank > 0, device=u_bsd.device)
    return Shard(u_bsd.shape[0], u_bsd.shape[1], continues_b, continues_b)


def packed_shard(
    where: str,
    u_bsd: Tensor,
    rank: int,
    size: int,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
) -> Shard:
    """Return the shard of packed rows.

    Args:
        where: for messages.
        u_bsd: this rank's tokens.
        rank: its place.
        size: ranks that share the rows.
        cu_seqlens: borders of the whole row.
        seq_idx: labels of the whole rows.

    Raises:
        PackingError: the borders or labels do not describe the whole rows.
    """
    batch, length = u_bsd.shape[:2]
    whole = length * size
    if cu_seqlens is not None and seq_idx is not None:
        raise PackingError(f"{where}: give cu_seqlens or seq_idx, not both.")
    labels_bS = _labels(where, cu_seqlens, batch, whole) if seq_idx is None else seq_idx
    if not isinstance(labels_bS, Tensor) or tuple(labels_bS.shape) != (batch, whole):
        given = tuple(labels_bS.shape) if isinstance(labels_bS, Tensor) else type(labels_bS)
        raise PackingError(
            f"{where}: seq_idx must label the whole rows of all {size} ranks, {(batch, whole)}; "
            f"got {given}. Every rank takes its part itself."
        )
    labels_bS = labels_bS.to(u_bsd.device)
    start = rank * length
    here_bs = labels_bS[:, start : start + length]
    segments = segment_rows(where, here_bs)
    same_bs = here_bs[:, 1:] == here_bs[:, :-1]
    edge_b1 = same_bs.new_ones(batch, 1)
    opens_bs = torch.cat([edge_b1, same_bs.cumprod(1).bool()], 1)
    closes_bs = torch.cat([same_bs.flip(1).cumprod(1).flip(1).bool(), edge_b1], 1)
    continues_b = torch.zeros(batch, dtype=torch.bool, device=u_bsd.device)
    seen_q = segments.cu_seqlens.diff()
    if rank > 0:
        continues_b = labels_bS[:, start - 1] == labels_bS[:, start]
        before_bS = labels_bS[:, :start]
        earlier_b = (before_bS == here_bs[:, :1]).flip(1).cumprod(1).sum(1)
        seen_q = seen_q.index_add(0, segments.first_b, earlier_b)
    return Shard(
        batch,
        length,
        continues_b,
        continues_b & (segments.first_b == segments.last_b),
        segments.cu_seqlens,
        segments.first_b,
        segments.last_b,
        opens_bs,
        closes_bs,
        seen_q,
    )


def _labels(where: str, cu_seqlens: Tensor | None, batch: int, whole: int) -> Tensor:
    """Turn the borders of the whole row into labels; empty sequences leave no trace."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        given = getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__)
        raise DtypeError(f"{where}: cu_seqlens must be an int32 or int64 tensor; got {given}.")
    borders = cu_seqlens.tolist()
    is_sound = cu_seqlens.dim() == 1 and len(borders) > 1 and borders == sorted(borders)
    if batch != 1 or not is_sound or borders[0] != 0 or borders[-1] != whole:
        raise PackingError(
            f"{where}: cu_seqlens must rise from 0 to the length of the whole row of all ranks, "
            f"{whole}, in batch 1; got {borders} in batch {batch}. Every rank takes its part "
            "itself."
        )
    token = torch.arange(whole, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.to(torch.int64), token, right=True)[None]


def reject_packed_cache(where: str, cache: object) -> None:
    """Raise `CacheError` if packed rows were given a state."""
    if cache is not None:
        raise CacheError(
            f"{where}: packed sequences on several ranks start from the empty state; got a cache. "
            "Leave it out."
        )
