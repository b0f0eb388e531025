"""The state of a stack with registers: that of its layers, and how far the registers have come."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.errors import CacheError
from anymamba.nn import cache_methods as methods
from anymamba.nn.cache import BlockCache, ModelCache
from anymamba.nn.registers import Cursor

__all__ = ["StackCache", "StackState", "stack_state"]


class StackCache(NamedTuple):
    """State of a stack with registers; all rows have come equally far.

    It has no `assign_`: the cursor is a number, and a value.
    """

    layers: tuple[BlockCache, ...]
    position_b: Tensor
    cursor: Cursor

    map = methods.map_tensors
    to = methods.to
    detach = methods.detach
    clone = methods.clone
    requires_grad_ = methods.requires_grad_
    rows = methods.rows
    numel = methods.numel
    nbytes = property(methods.cache_bytes)
    sanity = methods.sanity
    __repr__ = methods.cache_repr

    @property
    def position(self) -> Tensor:
        """How many tokens each row has seen; registers are not counted."""
        return self.position_b

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all tensors by dotted name, and the cursor as one more: length (-1), offsets."""
        length = -1 if self.cursor.length is None else self.cursor.length
        cursor = torch.tensor([length, *self.cursor.offsets], dtype=torch.int64, device="cpu")
        return {**methods.to_tensors(self), "cursor": cursor}

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, Tensor], types: Sequence[type[BlockCache]]
    ) -> "StackCache":
        """Build from the result of `to_tensors` and the type of each layer's cache."""
        if "cursor" not in tensors:
            raise CacheError("StackCache.from_tensors: 'cursor' is missing.")
        rest = {name: tensor for name, tensor in tensors.items() if name != "cursor"}
        length, *offsets = tensors["cursor"].tolist()
        cursor = Cursor(None if length < 0 else length, tuple(offsets))
        return cls(*ModelCache.from_tensors(rest, types), cursor)

    @classmethod
    def join(cls, caches: "Sequence[StackCache]") -> "StackCache":
        """Put the rows of several caches of one stack under each other."""
        if len(cursors := {cache.cursor for cache in caches}) != 1:
            raise CacheError(
                "StackCache.join: rows must have come equally far; "
                f"got {' and '.join(map(str, cursors))}. Run them one by one."
            )
        plain = [ModelCache(cache.layers, cache.position_b) for cache in caches]
        return cls(*ModelCache.join(plain), caches[0].cursor)


StackState = ModelCache | StackCache


def stack_state(
    layers: tuple[BlockCache, ...], position_b: Tensor, cursor: Cursor | None
) -> StackState:
    """Return the state with its cursor, or without one where there are no registers."""
    if cursor is None:
        return ModelCache(layers, position_b)
    return StackCache(layers, position_b, cursor)
