"""What every cache can do. The functions become methods of the NamedTuples in `cache.py`.

NamedTuples may not inherit methods, so each cache type lists them in its body. They are trees for
torch (`torch.utils._pytree`), cheap for the compiler, and values: nothing here changes a cache in
place except `assign_`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from anymamba.errors import CacheError
from anymamba.ops import guard

__all__ = [
    "assign_",
    "cache_bytes",
    "cache_repr",
    "clone",
    "detach",
    "from_tensors",
    "map_tensors",
    "named_tensors",
    "numel",
    "requires_grad_",
    "rows",
    "sanity",
    "to",
    "to_tensors",
    "zip_tensors",
]


C = TypeVar("C", bound=Any)


def named_tensors(cache: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor with its dotted name, nested states and layers included."""
    for name, value in zip(_names(cache), cache, strict=True):
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, tuple):
            yield from named_tensors(value, f"{prefix}{name}.")


def _names(cache: Any) -> Iterable[str]:
    """Return the field names of a cache, or the places of a tuple of layers."""
    return getattr(cache, "_fields", map(str, range(len(cache))))


def map_tensors(self: C, fn: Callable[[Tensor], Tensor]) -> C:
    """Return the cache with `fn` applied to every tensor."""
    values = [_map(value, fn) for value in self]
    return type(self)(*values) if hasattr(self, "_fields") else tuple(values)  # pyright: ignore[reportReturnType]


def _map(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    return map_tensors(value, fn) if isinstance(value, tuple) else value


def zip_tensors(self: C, other: C, fn: Callable[[Tensor, Tensor], Tensor]) -> C:
    """Return the cache of `fn(mine, theirs)` for each pair of tensors."""
    theirs = iter([tensor for _, tensor in named_tensors(other)])
    return map_tensors(self, lambda mine: fn(mine, next(theirs)))


def to(
    self: C,
    device: torch.device | str | torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> C:
    """Return the cache on another device, or in another floating dtype; counts stay integers."""
    if isinstance(device, torch.dtype):
        device, dtype = None, device
    return map_tensors(
        self, lambda x: x.to(device=device, dtype=dtype if x.is_floating_point() else None)
    )


def detach(self: C) -> C:
    """Return the cache cut off from the graph: where truncated back-propagation stops."""
    return map_tensors(self, Tensor.detach)


def clone(self: C) -> C:
    """Return a copy that shares no memory: a fork."""
    return map_tensors(self, Tensor.clone)


def requires_grad_(self: C, requires_grad: bool = True) -> C:
    """Ask for gradients of every floating tensor, in place; returns the cache itself."""
    for _, tensor in named_tensors(self):
        if tensor.is_floating_point():
            tensor.requires_grad_(requires_grad)
    return self


def rows(self: C, index: Any) -> C:
    """Return the rows of the batch that `index` picks: a slice, a list or a tensor of indices."""
    if isinstance(index, int):
        index = [index]
    if isinstance(index, list | tuple):
        is_mask = bool(index) and isinstance(index[0], bool)
        kind = torch.bool if is_mask else torch.long
        index = torch.tensor(index, dtype=kind, device="cpu")
    if isinstance(index, Tensor):
        index = index.unsqueeze(0) if index.dim() == 0 else index
        return map_tensors(self, lambda x: x[index.to(x.device)])
    return map_tensors(self, lambda x: x[index])


def numel(self: Any) -> int:
    """Return the number of stored values."""
    return sum(x.numel() for _, x in named_tensors(self))


def cache_bytes(self: Any) -> int:
    """Bytes of the stored values."""
    return sum(x.numel() * x.element_size() for _, x in named_tensors(self))


def sanity(self: Any) -> None:
    """Raise on NaN or infinity in any tensor, if those guards are on."""
    guard(type(self).__name__, **{n.replace(".", "_"): x for n, x in named_tensors(self)})


def assign_(self: C, other: C) -> C:
    """Copy another cache's values into this one's memory; returns this cache.

    An error or an interrupt leaves all the old values or all the new ones, unless gradients are
    recorded.
    """
    mine, theirs = dict(named_tensors(self)), dict(named_tensors(other))
    if type(self) is not type(other) or mine.keys() != theirs.keys():
        raise CacheError(
            f"{type(self).__name__}.assign_: the other cache must hold the same states; "
            f"got {type(other).__name__} with {sorted(theirs)}."
        )
    for name, tensor in mine.items():
        if tensor.shape != theirs[name].shape:
            raise CacheError(
                f"{type(self).__name__}.assign_: {name} has shape {tuple(tensor.shape)} but the "
                f"new value {tuple(theirs[name].shape)}."
            )
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise CacheError(
                f"{type(self).__name__}.assign_: {name} was made in inference mode and cannot be "
                "written to outside it. Clone the cache first."
            )
        if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
            raise CacheError(
                f"{type(self).__name__}.assign_: {name} is a leaf that needs a gradient, so it "
                "cannot be written to. Detach the cache first, or use torch.no_grad()."
            )
    # All checks come first, so that a refused call leaves nothing half written.
    _copy_all([*mine.values()], [theirs[name] for name in mine])
    return self


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy in one call, which Python cannot interrupt; one by one where torch knows only that."""
    everything = targets + sources
    one_by_one = (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in everything))
        or any(type(tensor) is not Tensor for tensor in everything)
    )
    if not one_by_one:
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def to_tensors(self: Any) -> dict[str, Tensor]:
    """Return all tensors by dotted name, such as `rotation.angle_bha`."""
    return dict(named_tensors(self))


def from_tensors(cls: type[C], tensors: dict[str, Tensor]) -> C:
    """Build a cache from the result of `to_tensors`; names must match exactly."""
    cache = _build(cls, tensors, "")
    known = {name for name, _ in named_tensors(cache)}
    if "rotation" in cls._fields and sum(name.startswith("rotation.") for name in known) != 1:
        raise CacheError(
            f"{cls.__name__}.from_tensors: the rotation needs angles or quaternions, one of them."
        )
    if unknown := sorted(set(tensors) - known):
        raise CacheError(f"{cls.__name__}.from_tensors: unexpected tensor {unknown[0]!r}.")
    return cache


def _build(cls: Any, tensors: dict[str, Tensor], prefix: str) -> Any:
    values = []
    for name in cls._fields:
        nested = _nested_type(cls, name)
        if nested is not None:
            values.append(_build(nested, tensors, f"{prefix}{name}."))
        elif prefix + name in tensors:
            values.append(tensors[prefix + name])
        elif name in cls._field_defaults:
            values.append(cls._field_defaults[name])
        else:
            raise CacheError(f"{cls.__name__}.from_tensors: {prefix + name!r} is missing.")
    return cls(*values)


def _nested_type(cls: Any, name: str) -> Any:
    annotation = cls.__annotations__[name]
    is_nested = isinstance(annotation, type) and issubclass(annotation, tuple)
    return annotation if is_nested and hasattr(annotation, "_fields") else None


def cache_repr(self: Any) -> str:
    """Name each tensor with its shape and dtype instead of printing values."""
    parts = [
        f"{name}={list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        for name, x in named_tensors(self)
    ]
    return f"{type(self).__name__}({', '.join(parts)})"
