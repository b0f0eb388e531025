"""Packed sequences: several sequences laid end to end in one row.

`cu_seqlens` holds the q + 1 borders, `0 = c[0] <= c[1] <= ... <= c[q] = s`; sequence j owns the
tokens `c[j] <= t < c[j+1]`; equal neighbours are an empty sequence. A packed call has batch 1 and
one state row per sequence.

Tables are made by tensor operations. Borders are read once per operator, to check them and to count
chunks; under a tracer, which has no values, `chunk_table` reserves the largest number of chunks the
borders could need, and the check becomes an assertion of the device.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.errors import DtypeError, PackingError

__all__ = ["ChunkTable", "Packing", "RowSegments", "chunk_table", "packing", "segment_rows"]


class Packing(NamedTuple):
    """Where each token of a packed row belongs."""

    cu_seqlens: Tensor  # (q + 1,) borders, int64
    sequence_s: Tensor  # the sequence of each token
    position_s: Tensor  # the token's place in its sequence
    borders: tuple[int, ...] | None  # the borders as numbers, unless traced

    @property
    def count(self) -> int:
        """Number of sequences q, empty ones included."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def length_q(self) -> Tensor:
        """Number of tokens of each sequence."""
        return self.cu_seqlens.diff()

    @property
    def is_last_s(self) -> Tensor:
        """Whether a token is the last of its sequence."""
        return self.position_s + 1 == self.length_q[self.sequence_s]

    def first(self, x_1s: Tensor, empty_q: Tensor) -> Tensor:
        """Pick each sequence's first token from (1, s, ...), or its row of `empty_q`."""
        return self._pick(x_1s, self.cu_seqlens[:-1], empty_q)

    def last(self, x_1s: Tensor, empty_q: Tensor) -> Tensor:
        """Pick each sequence's last token from (1, s, ...), or its row of `empty_q`."""
        return self._pick(x_1s, self.cu_seqlens[1:] - 1, empty_q)

    def _pick(self, x_1s: Tensor, index_q: Tensor, empty_q: Tensor) -> Tensor:
        picked = x_1s[0].index_select(0, index_q.clamp(0, x_1s.shape[1] - 1))
        has_tokens = (self.length_q > 0).view(-1, *[1] * (picked.dim() - 1))
        return torch.where(has_tokens, picked, empty_q)


def packing(
    where: str, cu_seqlens: Tensor, batch: int, length: int, device: torch.device
) -> Packing:
    """Check borders and derive where each token belongs.

    Raises:
        PackingError: batch is not 1, or the borders do not run from 0 to s without decreasing.
        DtypeError: the borders are not int32 or int64.
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        given = getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__)
        raise DtypeError(f"{where}: cu_seqlens must be an int32 or int64 tensor; got {given}.")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise PackingError(
            f"{where}: cu_seqlens must have one axis with at least 2 borders; "
            f"got shape {tuple(cu_seqlens.shape)}."
        )
    if batch != 1:
        raise PackingError(
            f"{where}: packed sequences lie end to end in one row, so batch must be 1; got {batch}."
        )
    numbers = None
    if torch.compiler.is_compiling():
        is_sound = (
            (cu_seqlens[0] == 0) & (cu_seqlens[-1] == length) & (cu_seqlens.diff() >= 0).all()
        )
        message = f"{where}: cu_seqlens must rise from 0 to the length"
        torch._assert_async(is_sound, message)  # pyright: ignore[reportPrivateImportUsage]
    elif cu_seqlens.device.type != "meta" and not _is_mapped(cu_seqlens):
        numbers = tuple(cu_seqlens.tolist())
        _check_borders(where, numbers, length)
    borders = cu_seqlens.to(device=device, dtype=torch.int64)
    token_s = torch.arange(length, device=device)
    sequence_s = torch.searchsorted(borders, token_s, right=True) - 1
    return Packing(borders, sequence_s, token_s - borders[sequence_s], numbers)


def _is_mapped(cu_seqlens: Tensor) -> bool:
    """Return whether a `torch.func` transform wraps the borders, so that they cannot be read."""
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return functorch.is_functorch_wrapped_tensor(cu_seqlens)


def _check_borders(where: str, borders: tuple[int, ...], length: int) -> None:
    if borders[0] != 0:
        raise PackingError(f"{where}: cu_seqlens must start at 0; got {borders[0]}.")
    if borders[-1] != length:
        raise PackingError(
            f"{where}: cu_seqlens must end at the sequence length {length}; got {borders[-1]}."
        )
    for place, (left, right) in enumerate(pairwise(borders)):
        if right < left:
            raise PackingError(
                f"{where}: cu_seqlens must not decrease; got {left} then {right} at entry {place}."
            )


class ChunkTable(NamedTuple):
    """A packed row cut into chunks that each belong to one sequence, padded at their ends."""

    token_n_l: Tensor  # (n, l) token in each slot; any valid index where the slot is padding
    filled_n_l: Tensor  # (n, l) whether the slot holds a token
    slot_s: Tensor  # the slot (chunk * l + offset) of each token
    sequence_n: Tensor  # the sequence of each chunk; q for chunks nobody needs
    is_first_n: Tensor  # whether the chunk opens its sequence
    is_last_n: Tensor  # whether the chunk closes its sequence
    last_chunk_q: Tensor  # the chunk that closes each sequence; n for empty sequences

    def spread(self, x_1s: Tensor) -> Tensor:
        """Lay (1, s, ...) out as (1, n * l, ...), zeros in the padding."""
        slots = x_1s.index_select(1, self.token_n_l.flatten())
        filled = self.filled_n_l.flatten().view(1, -1, *[1] * (x_1s.dim() - 2))
        return torch.where(filled, slots, torch.zeros((), dtype=x_1s.dtype, device=x_1s.device))

    def gather(self, x_1S: Tensor) -> Tensor:
        """Take (1, n * l, ...) back to (1, s, ...)."""
        return x_1S.index_select(1, self.slot_s)


def chunk_table(pack: Packing, chunk_len: int) -> ChunkTable:
    """Cut a packed row into chunks of `chunk_len` that never cross a border."""
    length = pack.position_s.shape[0]
    device = pack.cu_seqlens.device
    if pack.borders is None:
        # sum of ceil(len / l) is at most s // l + q, whatever the borders are.
        chunks = length // chunk_len + pack.count
    else:
        chunks = sum(-(-(stop - start) // chunk_len) for start, stop in pairwise(pack.borders))
    per_sequence = (pack.length_q + chunk_len - 1) // chunk_len
    end_q = per_sequence.cumsum(0)
    start_q = end_q - per_sequence
    chunk_n = torch.arange(chunks, device=device)
    sequence_n = torch.searchsorted(end_q, chunk_n, right=True)
    owner_n = sequence_n.clamp(max=pack.count - 1)
    token_n_l = (
        pack.cu_seqlens[owner_n, None]
        + (chunk_n - start_q[owner_n])[:, None] * chunk_len
        + torch.arange(chunk_len, device=device)
    )
    needed_n = sequence_n < pack.count
    filled_n_l = (token_n_l < pack.cu_seqlens[owner_n + 1, None]) & needed_n[:, None]
    return ChunkTable(
        token_n_l=token_n_l.clamp(0, length - 1),
        filled_n_l=filled_n_l,
        slot_s=start_q[pack.sequence_s] * chunk_len + pack.position_s,
        sequence_n=sequence_n,
        is_first_n=(chunk_n == start_q[owner_n]) & needed_n,
        is_last_n=(chunk_n + 1 == end_q[owner_n]) & needed_n,
        last_chunk_q=torch.where(per_sequence > 0, end_q - 1, chunks),
    )


class RowSegments(NamedTuple):
    """`seq_idx` of a batch, told as one packed row of b * s tokens."""

    cu_seqlens: Tensor  # borders in the flattened row
    first_b: Tensor  # the segment that opens each row
    last_b: Tensor  # the segment that closes each row


def segment_rows(where: str, seq_idx_bs: Tensor) -> RowSegments:
    """Turn segment labels into borders: a segment starts wherever the label changes.

    The number of segments depends on the data, so this reads from the device.

    Raises:
        PackingError: the labels do not have the two axes batch and sequence.
        DtypeError: the labels are not integers.

    Example:
        >>> segment_rows("demo", torch.tensor([[0, 0, 1], [7, 7, 7]])).cu_seqlens
        tensor([0, 2, 3, 6])
    """
    if not isinstance(seq_idx_bs, Tensor) or seq_idx_bs.dtype not in (torch.int32, torch.int64):
        given = getattr(seq_idx_bs, "dtype", type(seq_idx_bs).__name__)
        raise DtypeError(f"{where}: seq_idx must be an int32 or int64 tensor; got {given}.")
    if seq_idx_bs.dim() != 2 or seq_idx_bs.numel() == 0:
        raise PackingError(
            f"{where}: seq_idx must have the axes (batch, sequence), none empty; "
            f"got shape {tuple(seq_idx_bs.shape)}."
        )
    opens_bs = torch.ones_like(seq_idx_bs, dtype=torch.bool)
    opens_bs[:, 1:] = seq_idx_bs[:, 1:] != seq_idx_bs[:, :-1]
    starts = opens_bs.flatten().nonzero()[:, 0]
    last_b = opens_bs.sum(1).cumsum(0) - 1
    first_b = torch.cat([last_b.new_zeros(1), last_b[:-1] + 1])
    return RowSegments(
        torch.cat([starts, starts.new_tensor([seq_idx_bs.numel()])]), first_b, last_b
    )
