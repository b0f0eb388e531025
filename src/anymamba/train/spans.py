"""Which predictions come when: spans of documents, in a shuffled order that can be resumed.

A document of n tokens asks for n + 1 predictions: each of its tokens, and its end. A span is a run
of them, `begin <= t < end`. Nothing here reads a token.
"""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Reader", "Span", "SpanQueue", "SpanTable", "merge_spans"]


class Span(NamedTuple):
    """Predictions `begin <= t < end` of one document."""

    document: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        """Number of predictions."""
        return self.end - self.begin


class SpanTable:
    """The documents of a corpus, cut into spans of at most `longest` predictions.

    Args:
        lengths_q: tokens of each document.
        longest: predictions per span; positive.

    Example:
        >>> table = SpanTable(torch.tensor([4, 1]), longest=3)
        >>> [table[i] for i in range(len(table))]
        [Span(document=0, begin=0, end=3), Span(document=0, begin=3, end=5),
         Span(document=1, begin=0, end=2)]
    """

    def __init__(self, lengths_q: Tensor, longest: int) -> None:
        """Count the spans of each document; the spans themselves are made when asked for."""
        self._predictions_q = lengths_q + 1
        self._longest = longest
        counts_q = (self._predictions_q + longest - 1) // longest
        # The number of the first span of each document, and of the one after the last.
        self._first_q = torch.cat([counts_q.new_zeros(1), counts_q.cumsum(0)])

    def __len__(self) -> int:
        return int(self._first_q[-1])

    def __getitem__(self, number: int) -> Span:
        if not 0 <= number < len(self):
            raise IndexError(number)
        document = int(torch.searchsorted(self._first_q, number, right=True)) - 1
        begin = (number - int(self._first_q[document])) * self._longest
        end = min(begin + self._longest, int(self._predictions_q[document]))
        return Span(document, begin, end)


class SpanQueue:
    """Numbers of spans in shuffled order, epoch after epoch, each epoch in an order of its own.

    Args:
        count: number of spans; positive.
        seed: of the order.
        endless: else one epoch.
    """

    def __init__(self, count: int, seed: int, *, endless: bool = True) -> None:
        """Stand before the first span."""
        self.count, self.seed, self.endless = count, seed, endless
        self.move(0, 0)

    def move(self, epoch: int, place: int) -> None:
        """Stand before the span at `place` of an epoch."""
        self.epoch, self.place = epoch, place
        self._order = self._order_of(epoch)

    def draw(self) -> int | None:
        """Return the number of the next span; None at the end of the only epoch."""
        if self.place == self.count:
            if not self.endless:
                return None
            self.move(self.epoch + 1, 0)
        self.place += 1
        return int(self._order[self.place - 1])

    def draws(self) -> Tensor:
        """Return how often each span was drawn."""
        drawn = torch.full((self.count,), self.epoch)
        drawn[self._order[: self.place]] += 1
        return drawn

    def _order_of(self, epoch: int) -> Tensor:
        # A digest and not a sum: seed 1 in epoch 0 must not be seed 0 in epoch 1.
        digest = hashlib.sha256(f"{self.seed}:{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return torch.randperm(self.count, generator=generator)


class Reader:
    """Reads drawn spans end to end, in portions; a portion may end in the middle of a span."""

    def __init__(self, table: SpanTable, queue: SpanQueue) -> None:
        """Begin with no span."""
        self._table, self._queue = table, queue
        # The span being read, and how many of its predictions were; -1 means none.
        self.number, self.offset = -1, 0

    @property
    def continues(self) -> bool:
        """Whether the next portion begins inside a span that an earlier one began."""
        return self.number >= 0

    def take(self, room: int) -> list[Span]:
        """Return the spans, or parts of them, that fill `room` predictions; fewer at the end."""
        taken: list[Span] = []
        while room:
            if self.number < 0:
                number = self._queue.draw()
                if number is None:
                    break
                self.number = number
            whole = self._table[self.number]
            begin = whole.begin + self.offset
            part = Span(whole.document, begin, min(whole.end, begin + room))
            taken.append(part)
            room -= part.length
            self.offset += part.length
            if part.end == whole.end:
                self.number, self.offset = -1, 0
        return taken


def merge_spans(spans: list[Span]) -> list[Span]:
    """Join spans that touch or overlap in a document; the result is sorted.

    Example:
        >>> merge_spans([Span(0, 4, 6), Span(1, 0, 2), Span(0, 0, 4)])
        [Span(document=0, begin=0, end=6), Span(document=1, begin=0, end=2)]
    """
    merged: list[Span] = []
    for span in sorted(spans):
        last = merged[-1] if merged else None
        if last is not None and last.document == span.document and span.begin <= last.end:
            merged[-1] = last._replace(end=max(last.end, span.end))
        else:
            merged.append(span)
    return merged
