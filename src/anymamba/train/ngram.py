"""The yardstick: a Witten-Bell n-gram model of bytes, as strong as counting alone gets.

With c(h, w) how often symbol w followed the context h, c(h) the sum over w, and T(h) how many
different symbols followed h, each order leans on the next shorter context h':

    p(w | h) = (c(h, w) + T(h) * p(w | h')) / (c(h) + T(h))        p(w | nothing) = 1 / symbols

An unseen context has c = T = 0 and leaves p(w | h') as it is. The symbols are the 256 bytes and the
mark before and after each document, so the model is asked exactly what a byte-level network is.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.errors import ConfigError

__all__ = ["WittenBell", "byte_piece"]

MARK = 256
SYMBOLS = 257
# What stands before the beginning of a piece.
NOTHING = 257
BITS = 9


class OrderCounts(NamedTuple):
    """Counts of one order, sorted by key; a key is a context with a symbol behind it."""

    grams: Tensor
    gram_counts: Tensor
    contexts: Tensor
    context_counts: Tensor
    context_kinds: Tensor


def byte_piece(text: bytes) -> tuple[Tensor, Tensor]:
    """Return `(ids_s, targets_s)` of a whole document: what comes before each byte and its end.

    Example:
        >>> byte_piece(b"hi")
        (tensor([256, 104, 105]), tensor([104, 105, 256]))
    """
    marked = torch.tensor([MARK, *text, MARK])
    return marked[:-1], marked[1:]


class WittenBell:
    """An interpolated n-gram model of bytes.

    Args:
        order: symbols of a context, and the one predicted; 1 to 7.

    Example:
        >>> model = WittenBell(order=2).fit([byte_piece(b"abab")])
        >>> model.bits([byte_piece(b"ab")]) < model.bits([byte_piece(b"ba")])
        True
    """

    def __init__(self, order: int = 5) -> None:
        """Begin without counts."""
        if not 1 <= order <= 63 // BITS:
            raise ConfigError(
                f"WittenBell: order must lie in 1..{63 // BITS}, so that a context fits into a "
                f"64-bit number; got {order}."
            )
        self.order = order
        self._counts: list[OrderCounts] = []

    def fit(self, pieces: Iterable[tuple[Tensor, Tensor]]) -> "WittenBell":
        """Count; replaces earlier counts.

        Args:
            pieces: `(ids_s, targets_s)` of documents or of parts of them; ids in 0..256. The
                context of a piece's first symbol is what its ids show.

        Returns:
            The model itself.

        Raises:
            ConfigError: there is nothing to count, or a symbol is no byte and no mark.
        """
        grams = self._grams("WittenBell.fit", pieces)
        self._counts = [_count(grams & _mask(order)) for order in range(1, self.order + 1)]
        return self

    def bits(self, pieces: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Return how many bits the model needs for every target of the pieces together.

        Raises:
            ConfigError: the model was not fitted, there is nothing to predict, or a symbol is no
                byte and no mark.
        """
        if not self._counts:
            raise ConfigError("WittenBell.bits: the model has no counts. Call fit first.")
        grams = self._grams("WittenBell.bits", pieces)
        chance = torch.full(grams.shape, 1 / SYMBOLS, dtype=torch.float64)
        for order, counts in enumerate(self._counts, start=1):
            keys = grams & _mask(order)
            together = _look_up(counts.grams, counts.gram_counts, keys)
            context = keys >> BITS
            seen = _look_up(counts.contexts, counts.context_counts, context)
            kinds = _look_up(counts.contexts, counts.context_kinds, context)
            mixed = (together + kinds * chance) / (seen + kinds).clamp(min=1)
            chance = torch.where(seen > 0, mixed, chance)
        return float(-chance.log().sum()) / math.log(2)

    def _grams(self, where: str, pieces: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Return, for each target, one number: the context's symbols, then the target."""
        found: list[Tensor] = []
        for ids_s, targets_s in pieces:
            both = torch.cat([ids_s, targets_s])
            wrong = both[(both < 0) | (both > MARK)]
            if len(wrong):
                raise ConfigError(
                    f"{where}: symbols must be bytes or the mark {MARK}; got {int(wrong[0])}. "
                    "Compare models of bytes only."
                )
            before = torch.cat([ids_s.new_full((max(0, self.order - 2),), NOTHING), ids_s])
            gram = targets_s.clone()
            for back in range(self.order - 1):
                gram |= before[len(before) - back - len(ids_s) :][: len(ids_s)] << BITS * (back + 1)
            found.append(gram)
        if not found:
            raise ConfigError(f"{where}: there must be at least one piece of text; got none.")
        return torch.cat(found)


def _mask(order: int) -> int:
    return (1 << BITS * order) - 1


def _count(keys: Tensor) -> OrderCounts:
    grams, gram_counts = torch.unique(keys, return_counts=True)
    contexts, group, kinds = torch.unique_consecutive(
        grams >> BITS, return_inverse=True, return_counts=True
    )
    counts = torch.zeros_like(contexts).index_add_(0, group, gram_counts)
    return OrderCounts(grams, gram_counts, contexts, counts, kinds)


def _look_up(sorted_keys: Tensor, values: Tensor, keys: Tensor) -> Tensor:
    """Return the value of each key, 0 where there is none."""
    place = torch.searchsorted(sorted_keys, keys).clamp(max=len(sorted_keys) - 1)
    return torch.where(sorted_keys[place] == keys, values[place], 0).to(torch.float64)
