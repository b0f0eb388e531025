"""State files: the caches of a block or of a stack of blocks, on disk.

A state file is a safetensors file. Its tensors have the dotted names of `cache.to_tensors()`; in a
stack each name is preceded by the place of its layer, as in `layers.0.ssm_bhpr`. The header says:

| key | value |
|---|---|
| `format` | `anymamba-state` |
| `version` | `1` |
| `types` | JSON: the type of the cache, or the list of types of a stack |
| `sizes` | JSON: the size of each letter of the layouts, or a list of such tables |
| `checksum` | CRC-32 of the entries above and of every tensor; finds accidents, not forgeries |

Files are written by `tensor_file` and read by the safetensors library.
"""

import json
import os
import re
import zlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from anymamba.errors import CacheError, CheckpointError, ShapeError
from anymamba.io.tensor_file import CODES, bytes_of, encode, write_atomically
from anymamba.nn import (
    Mamba1Cache,
    Mamba2Cache,
    Mamba3Cache,
    Mamba3DoubleSsdCache,
    Mamba3SingleSsdCache,
    RotationState,
)
from anymamba.notation import bind_dims

__all__ = ["load_state", "save_state"]

Cache = Mamba1Cache | Mamba2Cache | Mamba3Cache
File = str | os.PathLike[str]

FORMAT = "anymamba-state"
VERSION = 1
TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Mamba1Cache, Mamba2Cache, Mamba3SingleSsdCache, Mamba3DoubleSsdCache)
}


def save_state(cache: Cache | Sequence[Cache], file: File) -> None:
    """Write a cache, or the caches of a stack, to a state file; needs no extra package.

    The file appears whole or not at all: a crash while writing leaves an older file as it was.
    Values are stored bit by bit. Gradients and the device are not part of a state.

    Args:
        cache: the state of one block, or a list or tuple of states.
        file: where to write; an existing file is replaced, its folder must exist.

    Raises:
        CacheError: not a cache, an empty list, or a cache that holds no values (meta device).
        ShapeError: the tensors of the cache disagree in a size.
        CheckpointError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> cache = Mamba1Cache(torch.zeros(1, 8, 4), torch.ones(1, 8, 16))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_state([cache, cache], f"{folder}/talk.state")
        ...     load_state(f"{folder}/talk.state")[1]
        Mamba1Cache(conv_bik=[1, 8, 4] float32, ssm_bir=[1, 8, 16] float32)
    """
    # A cache is itself a tuple, so only plain lists and tuples are stacks.
    is_stack = type(cache) in (list, tuple)
    layers: list[Any] = list(cache) if is_stack else [cache]
    if not layers:
        raise CacheError("save_state: a stack must have at least one cache; got an empty list.")
    tensors: dict[str, Tensor] = {}
    types, sizes = [], []
    for place, layer in enumerate(layers):
        types.append(_type_of(layer))
        sizes.append(_sizes_of("save_state", layer))
        prefix = f"layers.{place}." if is_stack else ""
        tensors |= {prefix + name: tensor for name, tensor in layer.to_tensors().items()}
    facts = {
        "format": FORMAT,
        "version": str(VERSION),
        "types": json.dumps(types if is_stack else types[0]),
        "sizes": json.dumps(sizes if is_stack else sizes[0]),
    }
    facts["checksum"] = _checksum(facts, tensors)
    write_atomically("save_state", file, encode(tensors, facts))


def load_state(file: File, device: torch.device | str | None = None) -> Cache | list[Cache]:
    """Read a state file back: the cache that was saved, or the list of caches of a stack.

    The tensors are copies of their own, so the file may be replaced or removed afterwards.

    Args:
        file: a file that `save_state` wrote.
        device: where the tensors go; the CPU when omitted.

    Raises:
        CheckpointError: the file is missing, damaged, foreign or of a later version, or the extra
            package `safetensors` is not installed.
    """
    facts, tensors = _read(file)
    try:
        types, sizes = json.loads(facts["types"]), json.loads(facts["sizes"])
    except (KeyError, ValueError, RecursionError) as error:
        _refuse(file, "its header is damaged", error)
    is_stack = isinstance(types, list)
    names = types if is_stack else [types]
    groups = _by_layer(file, tensors, len(names)) if is_stack else [tensors]
    built = [_build(file, name, group) for name, group in zip(names, groups, strict=True)]
    found = [layer_sizes for _, layer_sizes in built]
    if sizes != (found if is_stack else found[0]):
        _refuse(file, "its tensors have other sizes than its header says")
    if facts.get("checksum") != _checksum(facts, tensors):
        _refuse(file, "its checksum does not match: bytes were changed after it was written")
    caches = [cache.to(device=device) for cache, _ in built]
    return caches if is_stack else caches[0]


def _type_of(cache: object) -> str:
    name = type(cache).__name__
    if TYPES.get(name) is not type(cache):
        raise CacheError(
            f"save_state: the state must be one of {', '.join(TYPES)}, or a list of those; "
            f"got {name}. Pass what prefill or step returned."
        )
    return name


def _refuse(file: File, why: str, cause: BaseException | None = None) -> NoReturn:
    raise CheckpointError(
        f"load_state: {os.fspath(file)!r} must be a whole state file; {why}. "
        "Use a copy, or write it again with save_state."
    ) from cause


def _sizes_of(where: str, cache: Any) -> dict[str, int]:
    """Return the size of each letter; raise if the tensors contradict each other or the type."""
    kind = type(cache).__name__
    for name, value in zip(cache._fields, cache, strict=True):
        is_rotation = isinstance(value, RotationState) and len(value.to_tensors()) == 1
        if not (is_rotation if name == "rotation" else isinstance(value, Tensor)):
            raise CacheError(
                f"{where}: {name} of a {kind} must be a tensor, a rotation either angles or "
                f"quaternions; got {value!r}."
            )
    tensors: dict[str, Tensor] = cache.to_tensors()
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise CacheError(
                f"{where}: {name} of a {kind} must be one of {', '.join(map(str, CODES))}; "
                f"got {tensor.dtype}. Cast it with cache.to(dtype=...)."
            )
        if tensor.device.type == "meta":
            raise CacheError(
                f"{where}: {name} of a {kind} must hold values; it is on the meta device. "
                "Make the cache with block.empty_cache(batch_size) on a real device."
            )
    return bind_dims(f"{where}: {kind}", **tensors)


def _checksum(facts: dict[str, str], tensors: dict[str, Tensor]) -> str:
    facts = {key: text for key, text in facts.items() if key != "checksum"}
    crc = zlib.crc32(json.dumps(sorted(facts.items())).encode())
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(bytes_of(tensor), crc)
    return f"{crc:08x}"


def _read(file: File) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the header's entries and the tensors, on the CPU."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(
            "load_state: the package safetensors must be installed; it cannot be imported. "
            "Run: pip install 'anymamba[io]'"
        ) from error
    try:
        with safe_open(os.fspath(file), framework="pt", device="cpu") as reader:
            facts = reader.metadata() or {}
            _check_format(file, facts)
            # The library maps the file into memory: copy, or a later writer changes our values.
            return facts, {name: reader.get_tensor(name).clone() for name in reader.keys()}  # noqa: SIM118
    except SafetensorError as error:
        _refuse(file, f"it is damaged, or no safetensors file ({error})", error)
    except OSError as error:
        raise CheckpointError(
            f"load_state: {os.fspath(file)!r} must be a readable file; {error}. Check the path."
        ) from error


def _check_format(file: File, facts: dict[str, str]) -> None:
    if facts.get("format") != FORMAT:
        _refuse(file, f"it is a safetensors file of another kind: format {facts.get('format')!r}")
    version = facts.get("version", "")
    if re.fullmatch("[0-9]{1,9}", version) and int(version) > VERSION:
        raise CheckpointError(
            f"load_state: {os.fspath(file)!r} must have version {VERSION} or less; got {version}. "
            "It was written by a later anymamba: upgrade with pip install -U anymamba."
        )
    if version != str(VERSION):
        _refuse(file, f"its version is {version!r}")


def _by_layer(file: File, tensors: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    groups: list[dict[str, Tensor]] = [{} for _ in range(count)]
    places = {str(place): group for place, group in enumerate(groups)}
    for name, tensor in tensors.items():
        head, _, rest = name.partition(".")
        place, _, field = rest.partition(".")
        if head != "layers" or place not in places:
            _refuse(file, f"{name!r} belongs to none of its {count} layers")
        places[place][field] = tensor
    return groups


def _build(file: File, name: object, tensors: dict[str, Tensor]) -> tuple[Any, dict[str, int]]:
    """Return the cache that `tensors` make up, and its sizes; raise if they do not fit the type."""
    if not isinstance(name, str) or name not in TYPES:
        raise CheckpointError(
            f"load_state: {os.fspath(file)!r} must hold one of {', '.join(TYPES)}; got {name!r}. "
            "It may come from a later anymamba: upgrade with pip install -U anymamba."
        )
    try:
        cache = TYPES[name].from_tensors(tensors)
        return cache, _sizes_of("load_state", cache)
    except (CacheError, ShapeError) as error:
        _refuse(file, f"its tensors do not make up a {name} ({error})", error)
