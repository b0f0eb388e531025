"""The states of the blocks: typed, differentiable values.

A cache is what a block needs to know of the past. `prefill` and `step` take one and return one;
nothing is hidden in the module. All have `.map(fn) .to() .detach() .clone() .requires_grad_()
.rows(index) .numel() .nbytes .sanity() .to_tensors() .from_tensors()` and a readable repr.

| cache | field | meaning |
|---|---|---|
| Mamba-1, Mamba-2 | `conv_*k` | the last k inputs of the convolution, newest last |
| all | `ssm_*` | the state of the scan, in float32 beside half types |
| Mamba-3 | `k_state_bmhr`, `v_state_bhp` | the last token's rotated key, and its raw value |
| Mamba-3 | `rotation` | the rotation accumulated so far |
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.errors import CacheError
from anymamba.nn import cache_methods as methods

__all__ = [
    "BlockCache",
    "KVCache",
    "Mamba1Cache",
    "Mamba2Cache",
    "Mamba3Cache",
    "Mamba3DoubleSsdCache",
    "Mamba3SingleSsdCache",
    "ModelCache",
    "RotationState",
    "join_rows",
]


class RotationState(NamedTuple):
    """Accumulated rotation: angles (complex) or unit quaternions; exactly one is present."""

    angle_bha: Tensor | None = None
    quaternion_bhj4: Tensor | None = None

    map = methods.map_tensors
    to = methods.to
    detach = methods.detach
    clone = methods.clone
    requires_grad_ = methods.requires_grad_
    rows = methods.rows
    numel = methods.numel
    nbytes = property(methods.cache_bytes)
    sanity = methods.sanity
    to_tensors = methods.to_tensors
    from_tensors = classmethod(methods.from_tensors)
    __repr__ = methods.cache_repr

    def angle(self) -> Tensor:
        """Return the angles; raises `CacheError` if this is a quaternion state."""
        if self.angle_bha is None:
            raise CacheError(f"RotationState: expected angles; this state is {self}.")
        return self.angle_bha

    def quaternion(self) -> Tensor:
        """Return the quaternions; raises `CacheError` if this is an angle state."""
        if self.quaternion_bhj4 is None:
            raise CacheError(f"RotationState: expected quaternions; this state is {self}.")
        return self.quaternion_bhj4


class Mamba1Cache(NamedTuple):
    """State of a Mamba-1 block."""

    conv_bik: Tensor
    ssm_bir: Tensor

    map = methods.map_tensors
    to = methods.to
    detach = methods.detach
    clone = methods.clone
    requires_grad_ = methods.requires_grad_
    rows = methods.rows
    numel = methods.numel
    nbytes = property(methods.cache_bytes)
    sanity = methods.sanity
    assign_ = methods.assign_
    to_tensors = methods.to_tensors
    from_tensors = classmethod(methods.from_tensors)
    __repr__ = methods.cache_repr


class Mamba2Cache(NamedTuple):
    """State of a Mamba-2 block."""

    conv_bvk: Tensor
    ssm_bhpr: Tensor

    map = methods.map_tensors
    to = methods.to
    detach = methods.detach
    clone = methods.clone
    requires_grad_ = methods.requires_grad_
    rows = methods.rows
    numel = methods.numel
    nbytes = property(methods.cache_bytes)
    sanity = methods.sanity
    assign_ = methods.assign_
    to_tensors = methods.to_tensors
    from_tensors = classmethod(methods.from_tensors)
    __repr__ = methods.cache_repr


class Mamba3SingleSsdCache(NamedTuple):
    """State of a Mamba-3 block that runs one pass per call (the default)."""

    ssm_bhpr: Tensor
    k_state_bmhr: Tensor
    v_state_bhp: Tensor
    rotation: RotationState

    map = methods.map_tensors
    to = methods.to
    detach = methods.detach
    clone = methods.clone
    requires_grad_ = methods.requires_grad_
    rows = methods.rows
    numel = methods.numel
    nbytes = property(methods.cache_bytes)
    sanity = methods.sanity
    assign_ = methods.assign_
    to_tensors = methods.to_tensors
    from_tensors = classmethod(methods.from_tensors)
    __repr__ = methods.cache_repr

    def to_single(self) -> "Mamba3SingleSsdCache":
        """Return this cache."""
        return self

    def to_double(self) -> "Mamba3DoubleSsdCache":
        """Hand the state to the two-pass pathway; at a call boundary the fields are the same."""
        return Mamba3DoubleSsdCache(*self)


class Mamba3DoubleSsdCache(NamedTuple):
    """State of a Mamba-3 block that runs two passes per call."""

    ssm_bhpr: Tensor
    k_state_bmhr: Tensor
    v_state_bhp: Tensor
    rotation: RotationState

    map = methods.map_tensors
    to = methods.to
    detach = methods.detach
    clone = methods.clone
    requires_grad_ = methods.requires_grad_
    rows = methods.rows
    numel = methods.numel
    nbytes = property(methods.cache_bytes)
    sanity = methods.sanity
    assign_ = methods.assign_
    to_tensors = methods.to_tensors
    from_tensors = classmethod(methods.from_tensors)
    __repr__ = methods.cache_repr

    def to_single(self) -> Mamba3SingleSsdCache:
        """Hand the state to the one-pass pathway; at a call boundary the fields are the same."""
        return Mamba3SingleSsdCache(*self)

    def to_double(self) -> "Mamba3DoubleSsdCache":
        """Return this cache."""
        return self


Mamba3Cache = Mamba3SingleSsdCache | Mamba3DoubleSsdCache


class KVCache(NamedTuple):
    """State of an attention layer: keys and values of the past, the longest row and perhaps room.

    Row b uses the first `length_b[b]` places of the time axis. What lies beyond has no weight, but
    must be finite: modules multiply it by zero.
    """

    k_bhst: Tensor
    v_bhst: Tensor
    length_b: Tensor
    conv_bvk: Tensor | None = None

    map = methods.map_tensors
    to = methods.to
    detach = methods.detach
    clone = methods.clone
    requires_grad_ = methods.requires_grad_
    rows = methods.rows
    numel = methods.numel
    nbytes = property(methods.cache_bytes)
    sanity = methods.sanity
    assign_ = methods.assign_
    to_tensors = methods.to_tensors
    from_tensors = classmethod(methods.from_tensors)
    __repr__ = methods.cache_repr


BlockCache = Mamba1Cache | Mamba2Cache | Mamba3SingleSsdCache | Mamba3DoubleSsdCache | KVCache


class ModelCache(NamedTuple):
    """State of a stack of layers: one cache per layer, and how many tokens each row has seen."""

    layers: tuple[BlockCache, ...]
    position_b: Tensor

    map = methods.map_tensors
    to = methods.to
    detach = methods.detach
    clone = methods.clone
    requires_grad_ = methods.requires_grad_
    rows = methods.rows
    numel = methods.numel
    nbytes = property(methods.cache_bytes)
    sanity = methods.sanity
    assign_ = methods.assign_
    to_tensors = methods.to_tensors
    __repr__ = methods.cache_repr

    @property
    def position(self) -> Tensor:
        """How many tokens each row has seen."""
        return self.position_b

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, Tensor], types: Sequence[type[BlockCache]]
    ) -> "ModelCache":
        """Build from the result of `to_tensors` and the type of each layer's cache."""
        groups: list[dict[str, Tensor]] = [{} for _ in types]
        places = [str(place) for place in range(len(types))]
        for name, tensor in tensors.items():
            head, _, rest = name.partition(".")
            place, _, field = rest.partition(".")
            if head == "layers" and place in places and field:
                groups[places.index(place)][field] = tensor
            elif name != "position_b":
                raise CacheError(f"ModelCache.from_tensors: unexpected tensor {name!r}.")
        if "position_b" not in tensors:
            raise CacheError("ModelCache.from_tensors: 'position_b' is missing.")
        layers: list[BlockCache] = []
        for kind, group in zip(types, groups, strict=True):
            layers.append(methods.from_tensors(kind, group))  # pyright: ignore[reportArgumentType]
        return cls(tuple(layers), tensors["position_b"])

    @classmethod
    def join(cls, caches: "Sequence[ModelCache]") -> "ModelCache":
        """Put the rows of several caches of one model under each other."""
        layers = tuple(
            join_rows(column) for column in zip(*(cache.layers for cache in caches), strict=True)
        )
        return cls(layers, torch.cat([cache.position_b for cache in caches]))


def join_rows(caches: Sequence[BlockCache]) -> BlockCache:
    """Put the rows of several caches of one layer under each other; keys are padded to fit."""
    kinds = {type(cache) for cache in caches}
    if len(kinds) != 1:
        names = sorted(kind.__name__ for kind in kinds)
        raise CacheError(f"join_rows: caches must be of one type; got {', '.join(names)}.")
    if isinstance(caches[0], KVCache):
        longest = max(cache.k_bhst.shape[2] for cache in caches)  # pyright: ignore[reportAttributeAccessIssue]
        caches = [_padded(cache, longest) for cache in caches]  # pyright: ignore[reportArgumentType]
    columns = zip(*(methods.named_tensors(cache) for cache in caches), strict=True)
    joined = iter([torch.cat([tensor for _, tensor in column]) for column in columns])
    return methods.map_tensors(caches[0], lambda _: next(joined))


def _padded(cache: KVCache, length: int) -> KVCache:
    missing = length - cache.k_bhst.shape[2]
    pad = (0, 0, 0, missing)
    return cache._replace(k_bhst=F.pad(cache.k_bhst, pad), v_bhst=F.pad(cache.v_bhst, pad))
