"""Batches of tokens: packed documents, or windows that carry their document's state.

    packed     ids (1, batch * window) and `cu_seqlens`: every sequence starts from an empty state
    carried    ids (batch, window): row i goes on where row i of the batch before ended, from its
               state, unless `carry[i]` is false; `seq_idx` marks documents that begin inside a row

Both go straight into `lm.loss`, `lm.forward` and `lm.prefill`. No state crosses from one document
into another. The order is a function of the seed, and a position is a handful of numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from anymamba.errors import CheckpointError, ConfigError
from anymamba.ops import IGNORE
from anymamba.train.recipe_sections import DataRecipe
from anymamba.train.shards import TokenStore
from anymamba.train.spans import Reader, Span, SpanQueue, SpanTable, merge_spans

__all__ = [
    "Batch",
    "Batches",
    "CarriedBatches",
    "PackedBatches",
    "training_batches",
    "validation_batches",
]

# Validation takes the same part of the held-out text whatever the seed of training is.
VALIDATION_SEED = 0


class Batch(NamedTuple):
    """What one forward pass needs.

    Args:
        ids_bs: tokens, each document after its start mark; int64.
        targets_bs: the token each position predicts, the end mark last; -100 where none counts.
        cu_seqlens: borders of the packed sequences; None when carried.
        carry: whether a row goes on from its state after the batch before; None when packed.
        seq_idx: labels of the documents in a row; None when packed, or when no document begins
            inside a row.
        bytes_count: bytes of text that the targets stand for. With a tokenizer that is not bytes,
            a token counts as many as its document's tokens have on average.
    """

    ids_bs: Tensor
    targets_bs: Tensor
    cu_seqlens: Tensor | None
    carry: Tensor | None
    seq_idx: Tensor | None
    bytes_count: float

    @property
    def predictions(self) -> int:
        """Number of targets that count."""
        return int((self.targets_bs != IGNORE).sum())

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on a device."""
        return Batch(
            self.ids_bs.to(device),
            self.targets_bs.to(device),
            None if self.cu_seqlens is None else self.cu_seqlens.to(device),
            None if self.carry is None else self.carry.to(device),
            None if self.seq_idx is None else self.seq_idx.to(device),
            self.bytes_count,
        )


class Batches(ABC):
    """An endless, resumable stream of batches; `PackedBatches` or `CarriedBatches`."""

    def __init__(self, store: TokenStore, *, window: int, batch: int, seed: int = 0) -> None:
        """Stand before the first batch."""
        if window < 1 or batch < 1:
            raise ConfigError(
                f"batches: window and batch must be positive; got {window} and {batch}."
            )
        self._store, self._window, self._batch = store, window, batch
        self._table = SpanTable(store.lengths_q, self._longest())
        self._queue = SpanQueue(len(self._table), seed)
        self._readers = [Reader(self._table, self._queue) for _ in range(self._rows())]
        self._drawn = 0

    @property
    def epoch(self) -> float:
        """How often the corpus was read, as a fraction of documents and windows begun."""
        return self._queue.epoch + self._queue.place / self._queue.count

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        carry = [reader.continues for reader in self._readers]
        rows = [reader.take(self._room()) for reader in self._readers]
        self._drawn += 1
        return self._assemble(rows, carry)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as plain numbers and strings."""
        return {
            **self._identity(),
            "drawn": self._drawn,
            "epoch": self._queue.epoch,
            "place": self._queue.place,
            "rows": [[reader.number, reader.offset] for reader in self._readers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position; the next batch is the one that would have come there.

        Raises:
            CheckpointError: the position belongs to other tokens, sizes or another seed.
        """
        for name, own in self._identity().items():
            if state.get(name) != own:
                raise CheckpointError(
                    f"batches: a position can be taken up only with the same {name}; it was saved "
                    f"with {state.get(name)!r}, this is {own!r}. Restore the data and the recipe."
                )
        self._drawn = state["drawn"]
        self._queue.move(state["epoch"], state["place"])
        for reader, (number, offset) in zip(self._readers, state["rows"], strict=True):
            reader.number, reader.offset = number, offset

    def seen_spans(self) -> list[Span]:
        """Return the predictions that were handed out at least once, joined where they touch."""
        draws = self._queue.draws()
        # A span is read from its beginning, so what was seen of it is its longest reading.
        partial: dict[int, list[int]] = {}
        for reader in self._readers:
            if reader.continues:
                partial.setdefault(reader.number, []).append(reader.offset)
        spans: list[Span] = []
        for number in draws.nonzero().flatten().tolist():
            span, offsets = self._table[number], partial.get(number, [])
            if int(draws[number]) == len(offsets):
                span = span._replace(end=span.begin + max(offsets))
            spans.append(span)
        return merge_spans(spans)

    def close(self) -> None:
        """Let go of the token files."""
        self._store.close()

    def _identity(self) -> dict[str, Any]:
        return {
            "tokens": self._store.fingerprint,
            "kind": type(self).__name__,
            "window": self._window,
            "batch": self._batch,
            "seed": self._queue.seed,
        }

    @abstractmethod
    def _longest(self) -> int:
        """Return the longest span."""

    @abstractmethod
    def _rows(self) -> int:
        """Return the number of rows that are read side by side."""

    @abstractmethod
    def _room(self) -> int:
        """Return the predictions of a row."""

    @abstractmethod
    def _assemble(self, rows: list[list[Span]], carry: list[bool]) -> Batch:
        """Make a batch of the spans of each row."""


class PackedBatches(Batches):
    """Windows of documents, shuffled and laid end to end in one row of `window * batch` tokens.

    A document longer than a window is cut into windows, which come in no order; a window that does
    not fit into a batch goes on in the next one as a sequence of its own.

    Args:
        store: the tokens.
        window: longest sequence.
        batch: windows per batch.
        seed: of the order.
    """

    def _longest(self) -> int:
        return self._window

    def _rows(self) -> int:
        return 1

    def _room(self) -> int:
        return self._window * self._batch

    def _assemble(self, rows: list[list[Span]], carry: list[bool]) -> Batch:
        return packed_batch(self._store, rows[0])


class CarriedBatches(Batches):
    """Consecutive windows of documents, a document per row at a time.

    A document that is longer than a row's fair share of the corpus is cut into such shares, so that
    every row has text of its own even if the corpus is one file.

    Args:
        store: the tokens.
        window: tokens per row and batch.
        batch: rows.
        seed: of the order of documents.
    """

    def _longest(self) -> int:
        return fair_share(self._store.lengths_q, self._window, self._batch)

    def _rows(self) -> int:
        return self._batch

    def _room(self) -> int:
        return self._window

    def _assemble(self, rows: list[list[Span]], carry: list[bool]) -> Batch:
        return carried_batch(self._store, rows, carry, self._window)


def training_batches(store: TokenStore, recipe: DataRecipe) -> Batches:
    """Return the endless stream that a recipe asks for."""
    kind = PackedBatches if recipe.mode == "packed" else CarriedBatches
    return kind(store, window=recipe.window, batch=recipe.batch, seed=recipe.seed)


def validation_batches(
    store: TokenStore, recipe: DataRecipe, max_tokens: int | None = None
) -> Iterator[Batch]:
    """Yield every held-out prediction once, in batches of the recipe's mode and sizes.

    Args:
        store: the tokens.
        recipe: gives mode, window and batch; the order does not depend on its seed.
        max_tokens: stop after this many predictions, always the same ones; none means all.
    """
    packed = recipe.mode == "packed"
    window, batch = recipe.window, recipe.batch
    longest = window if packed else fair_share(store.lengths_q, window, batch)
    table = SpanTable(store.lengths_q, longest)
    queue = SpanQueue(len(table), VALIDATION_SEED, endless=False)
    readers = [Reader(table, queue) for _ in range(1 if packed else batch)]
    room = window * batch if packed else window
    left = int(store.lengths_q.sum()) + len(store.lengths_q) if max_tokens is None else max_tokens
    while left > 0:
        carry = [reader.continues for reader in readers]
        rows: list[list[Span]] = []
        for reader in readers:
            rows.append(reader.take(min(room, left)))
            left -= sum(span.length for span in rows[-1])
        if not any(rows):
            return
        if packed:
            yield packed_batch(store, rows[0])
        else:
            yield carried_batch(store, rows, carry, window)


def packed_batch(store: TokenStore, spans: Sequence[Span]) -> Batch:
    """Lay spans end to end in one row."""
    pieces = [store.piece(span) for span in spans]
    lengths = torch.tensor([0, *(span.length for span in spans)])
    return Batch(
        ids_bs=torch.cat([ids_s for ids_s, _ in pieces])[None],
        targets_bs=torch.cat([targets_s for _, targets_s in pieces])[None],
        cu_seqlens=lengths.cumsum(0),
        carry=None,
        seq_idx=None,
        bytes_count=sum(map(store.bytes_of, spans)),
    )


def carried_batch(
    store: TokenStore, rows: Sequence[Sequence[Span]], carry: Sequence[bool], window: int
) -> Batch:
    """Lay the spans of each row end to end, and fill rows that have run out of text."""
    shape = len(rows), window
    ids_bs = torch.zeros(shape, dtype=torch.int64)
    targets_bs = torch.full(shape, IGNORE)
    labels_bs = torch.zeros(shape, dtype=torch.int32)
    for row, spans in enumerate(rows):
        place = 0
        for label, span in enumerate(spans):
            here = slice(place, place + span.length)
            ids_bs[row, here], targets_bs[row, here] = store.piece(span)
            labels_bs[row, here] = label
            place += span.length
        # What fills the row belongs to no document, but it may share the last label: nothing
        # reads the state after it.
        labels_bs[row, place:] = max(0, len(spans) - 1)
    return Batch(
        ids_bs=ids_bs,
        targets_bs=targets_bs,
        cu_seqlens=None,
        carry=torch.tensor([go and bool(spans) for go, spans in zip(carry, rows, strict=True)]),
        seq_idx=labels_bs if bool(labels_bs.any()) else None,
        bytes_count=sum(store.bytes_of(span) for spans in rows for span in spans),
    )


def fair_share(lengths_q: Tensor, window: int, batch: int) -> int:
    """Return the longest span of carried rows: a row's share of all, in whole windows.

    Example:
        >>> fair_share(torch.tensor([99]), window=10, batch=4)
        30
    """
    total = int(lengths_q.sum()) + len(lengths_q)
    windows = -(-total // (batch * window))
    return max(1, windows) * window
