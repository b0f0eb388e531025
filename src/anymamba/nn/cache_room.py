"""Room for tokens to come behind the keys and values of attention.

Row b of a `KVCache` uses the first `length_b[b]` places; what lies behind has no weight. Whoever
decodes many tokens makes room for them beforehand, and gives the state away without it.
"""

from collections.abc import Callable

from torch import Tensor

from anymamba.errors import CacheError
from anymamba.nn.cache import BlockCache, KVCache, ModelCache

__all__ = ["check_past", "with_room", "without_room"]


def with_room(cache: ModelCache, places: int) -> ModelCache:
    """Return a copy whose keys and values have room for so many more tokens than they had."""
    return _resized("with_room", cache, lambda past: past.k_bhst.shape[2] + places)


def without_room(cache: ModelCache) -> ModelCache:
    """Return a copy whose keys and values end with the longest row."""
    return _resized("without_room", cache, lambda past: int(past.length_b.max()))


def _resized(where: str, cache: ModelCache, places_of: Callable[[KVCache], int]) -> ModelCache:
    def copied(layer: BlockCache) -> BlockCache:
        if not isinstance(layer, KVCache):
            return layer.clone()
        check_past(where, layer)
        places = places_of(layer)
        return KVCache(
            _moved(layer.k_bhst, places),
            _moved(layer.v_bhst, places),
            layer.length_b.clone(),
            None if layer.conv_bvk is None else layer.conv_bvk.clone(),
        )

    return cache._replace(
        layers=tuple(map(copied, cache.layers)), position_b=cache.position_b.clone()
    )


def check_past(where: str, past: KVCache) -> list[int]:
    """Return the lengths of the rows, if keys and values have them.

    Raises:
        CacheError: there are not as many values as keys, or fewer than a length says.
    """
    remedy = "Use empty_cache(batch_size), or a cache that this model returned."
    shape = tuple(past.k_bhst.shape)
    if len(shape) != 4 or shape != tuple(past.v_bhst.shape) or past.length_b.dim() != 1:
        raise CacheError(
            f"{where}: k_bhst and v_bhst of a KVCache must have one shape of four axes, length_b "
            f"one axis; got {shape}, {tuple(past.v_bhst.shape)} and {tuple(past.length_b.shape)}. "
            + remedy
        )
    lengths = past.length_b.tolist()
    if not all(0 <= length <= shape[2] for length in lengths):
        raise CacheError(
            f"{where}: k_bhst has {shape[2]} places, so length_b must lie in 0..{shape[2]}; got "
            f"{lengths}. " + remedy
        )
    return lengths


def _moved(past_bhst: Tensor, places: int) -> Tensor:
    """Return a contiguous copy with so many places, zeros behind the last."""
    batch, heads, _, width = past_bhst.shape
    moved_bhst = past_bhst.new_zeros(batch, heads, places, width)
    kept_bhst = past_bhst[:, :, :places]
    moved_bhst[:, :, : kept_bhst.shape[2]] = kept_bhst
    return moved_bhst
