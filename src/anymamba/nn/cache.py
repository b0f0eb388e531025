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

from typing import NamedTuple

from torch import Tensor

from anymamba.errors import CacheError
from anymamba.nn import cache_methods as methods

__all__ = [
    "Mamba1Cache",
    "Mamba2Cache",
    "Mamba3Cache",
    "Mamba3DoubleSsdCache",
    "Mamba3SingleSsdCache",
    "RotationState",
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
            raise CacheError("RotationState: expected angles; this state holds quaternions.")
        return self.angle_bha

    def quaternion(self) -> Tensor:
        """Return the quaternions; raises `CacheError` if this is an angle state."""
        if self.quaternion_bhj4 is None:
            raise CacheError("RotationState: expected quaternions; this state holds angles.")
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
