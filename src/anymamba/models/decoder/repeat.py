"""A token that is run like the one before it: nothing that was checked then is checked again.

After a token the caches hold its weights and nothing of Python's. To ask everything anew took 0.2
to 0.4 ms of tokens of 2.5 to 9 ms; what is left here is what may have changed even though nobody
changed the model: the state, the settings, and how torch is asked to compute.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from anymamba import settings
from anymamba.models.decoder.compiled import Bound, Decoder
from anymamba.nn import ModelCache

__all__ = ["Repeat"]

_ID = torch.int64


class Repeat(NamedTuple):
    """The call of a token that was checked in all respects; good while the model is unchanged."""

    decoder: Decoder
    # It holds its cache, a tuple of tuples down to the tensors: no other can be taken for it.
    bound: Bound
    switches: settings.Settings

    @classmethod
    def of(cls, decoder: Decoder, bound: Bound) -> "Repeat | None":
        """Return what the next token may repeat.

        Nothing where the cache could change its tensors, or where attention has to be given room.
        """
        cache = bound.cache
        is_fixed = type(cache) is ModelCache and type(cache.layers) is tuple
        if decoder.has_attention or not is_fixed:
            return None
        return cls(decoder, bound, settings.current())

    def ids_of(self, ids_b: Tensor, cache: ModelCache) -> list[int] | None:
        """Return the ids if this token can be run in the same way; else it is checked as any other.

        Args:
            ids_b: what the caller gave as ids.
            cache: what the caller gave as state.
        """
        if cache is not self.bound.cache or settings.current() is not self.switches:
            return None
        if type(ids_b) is not Tensor or ids_b.dtype is not _ID or not ids_b.is_cpu:
            return None
        if torch.is_autocast_enabled("cpu") or torch._C._are_functorch_transforms_active():
            return None
        ids = ids_b.tolist()
        if type(ids) is not list or len(ids) != self.bound.binding.rows or type(ids[0]) is not int:
            return None  # other axes
        is_known = min(ids) >= 0 and max(ids) < self.decoder.vocabulary
        return ids if is_known and self.bound.binding.still_lie(self.bound.tensors) else None
