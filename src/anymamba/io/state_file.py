"""State files: the state of a block, of a list of blocks or of a model, on disk.

A state file is a safetensors file. Its tensors have the dotted names of `cache.to_tensors()`; in a
list each name is preceded by the place of its block, as in a model: `layers.0.ssm_bhpr`. The header
says:

| key | value |
|---|---|
| `format` | `anymamba-state` |
| `version` | `1` |
| `types` | JSON: a type, a list of types, or `{"ModelCache": [types of the layers]}`; |
| | with registers `{"StackCache": [types], "cursor": [length or null, offsets]}` |
| `sizes` | JSON: the size of each letter of the layouts, or a list of such tables |
| `checksum` | CRC-32 of the entries above and of every tensor; finds accidents, not forgeries |

Files are written and read by the safetensors library.
"""

import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from anymamba.errors import CacheError, CheckpointError, ShapeError
from anymamba.io.tensor_file import DTYPES, bytes_of, write_safetensors
from anymamba.nn import (
    BlockCache,
    Cursor,
    KVCache,
    Mamba1Cache,
    Mamba2Cache,
    Mamba3DoubleSsdCache,
    Mamba3SingleSsdCache,
    ModelCache,
    RotationState,
    StackCache,
)
from anymamba.notation import bind_dims, layout_of

__all__ = ["load_state", "save_state"]

State = BlockCache | ModelCache | StackCache
File = str | os.PathLike[str]

FORMAT = "anymamba-state"
VERSION = 1
TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Mamba1Cache, Mamba2Cache, Mamba3SingleSsdCache, Mamba3DoubleSsdCache, KVCache)
}
MODEL, STACK = ModelCache.__name__, StackCache.__name__
# Fields that count tokens; all others are floating point.
COUNTS = ("length_b", "position_b")


class Description(NamedTuple):
    """What a state consists of: the `types` and `sizes` of the header, and the tensors."""

    types: Any
    sizes: Any
    tensors: dict[str, Tensor]


def save_state(cache: State | Sequence[BlockCache], file: File) -> None:
    """Write the state of a block, of a list of blocks or of a model to a file.

    The file appears whole or not at all: a crash while writing leaves an older file as it was.
    Values are stored bit by bit. Gradients and the device are not part of a state. Writing needs no
    extra package.

    Args:
        cache: what `prefill` or `step` returned, or a list or tuple of such block states.
        file: where to write; an existing file is replaced, its folder must exist.

    Raises:
        CacheError: not a state, an empty list, or a state that holds no values (meta device).
        ShapeError: the tensors of the state disagree in a size.
        CheckpointError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> cache = Mamba1Cache(torch.zeros(1, 8, 4), torch.ones(1, 8, 16))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_state([cache, cache], f"{folder}/talk.state")
        ...     load_state(f"{folder}/talk.state")[1]
        Mamba1Cache(conv_bik=[1, 8, 4] float32, ssm_bir=[1, 8, 16] float32)
    """
    types, sizes, tensors = _describe("save_state", cache)
    facts = {
        "format": FORMAT,
        "version": str(VERSION),
        "types": json.dumps(types),
        "sizes": json.dumps(sizes),
    }
    facts["checksum"] = _checksum(facts, tensors)
    # Links are followed: a state file may be one on purpose.
    write_safetensors("save_state", Path(os.path.realpath(file)), tensors, facts)


def load_state(file: File, device: torch.device | str | None = None) -> Any:
    """Read a state file back: the cache that was saved, or the list of caches.

    The tensors are copies of their own, so the file may be replaced or removed afterwards.

    Args:
        file: a file that `save_state` wrote.
        device: where the tensors go; the CPU when omitted.

    Returns:
        A cache of the type that was saved; for a list or tuple of caches, a list.

    Raises:
        CheckpointError: the file is missing, damaged, foreign or of a later version, or the extra
            package `safetensors` is not installed.
    """
    facts, tensors = _read(file)
    try:
        types, sizes = json.loads(facts["types"]), json.loads(facts["sizes"])
    except (KeyError, ValueError, RecursionError) as error:
        _refuse(file, "its header is damaged", error)
    try:
        state = _build(file, types, tensors)
        found = _describe("load_state", state)
    except (CacheError, ShapeError) as error:
        _refuse(file, f"its tensors do not make up what its header says ({error})", error)
    if sizes != found.sizes:
        _refuse(file, "its tensors have other sizes than its header says")
    if facts.get("checksum") != _checksum(facts, tensors):
        _refuse(file, "its checksum does not match: bytes were changed after it was written")
    if isinstance(state, list):
        return [cache.to(device=device) for cache in state]
    return state.to(device=device)


def _refuse(file: File, why: str, cause: BaseException | None = None) -> NoReturn:
    raise CheckpointError(
        f"load_state: {os.fspath(file)!r} must be a whole state file; {why}. "
        "Use a copy, or write it again with save_state."
    ) from cause


def _describe(where: str, state: Any) -> Description:
    """Take a state apart; raise if it is none, or if its tensors do not fit it."""
    # A cache is itself a tuple, so only plain lists and tuples are lists of caches.
    is_model = type(state) in (ModelCache, StackCache)
    if not is_model and type(state) not in (list, tuple):
        return _describe_block(where, state)
    layers = state.layers if is_model else state
    if not layers:
        raise CacheError(f"{where}: a list of states must not be empty. Pass at least one.")
    parts = [_describe_block(where, layer) for layer in layers]
    types: Any = [part.types for part in parts]
    sizes = [part.sizes for part in parts]
    tensors = {
        f"layers.{place}.{name}": tensor
        for place, part in enumerate(parts)
        for name, tensor in part.tensors.items()
    }
    if is_model:
        types = {type(state).__name__: types}
        if isinstance(state, StackCache):
            types["cursor"] = [state.cursor.length, *state.cursor.offsets]
        tensors["position_b"] = state.position_b
        _check_tensor(where, MODEL, "position_b", state.position_b)
        rows = sorted({tensor.shape[0] for tensor in tensors.values()})
        if len(rows) > 1:
            raise ShapeError(f"{where}: all layers of a {MODEL} must have one batch; got {rows}.")
    return Description(types, sizes, tensors)


def _describe_block(where: str, cache: Any) -> Description:
    kind = type(cache).__name__
    if TYPES.get(kind) is not type(cache):
        raise CacheError(
            f"{where}: a state must be a {MODEL}, one of {', '.join(TYPES)}, or a list of those; "
            f"got {kind}. Pass what prefill or step returned."
        )
    for name, value in zip(cache._fields, cache, strict=True):
        if name == "rotation" and isinstance(value, RotationState):
            for inner, tensor in value.to_tensors().items():
                _check_tensor(where, kind, f"{name}.{inner}", tensor)
            if len(value.to_tensors()) != 1:
                raise CacheError(
                    f"{where}: {name} of a {kind} must hold either angles or quaternions; "
                    f"got {value}."
                )
        elif value is not None or name not in cache._field_defaults:
            _check_tensor(where, kind, name, value)
    tensors: dict[str, Tensor] = cache.to_tensors()
    filled = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    return Description(kind, bind_dims(f"{where}: {kind}", **filled), tensors)


def _check_tensor(where: str, kind: str, name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise CacheError(
            f"{where}: {name} of a {kind} must be a tensor; got {type(tensor).__name__}."
        )
    dtypes = [torch.int64] if name in COUNTS else list(DTYPES)
    if tensor.dtype not in dtypes:
        raise CacheError(
            f"{where}: {name} of a {kind} must be {' or '.join(map(str, dtypes))}; "
            f"got {tensor.dtype}."
        )
    if tensor.device.type == "meta":
        raise CacheError(
            f"{where}: {name} of a {kind} must hold values; it is on the meta device. "
            "Make the cache on a real device."
        )
    if tensor.dim() != len(layout_of(name)):
        raise ShapeError(
            f"{where}: {name} of a {kind} must have {len(layout_of(name))} axes; "
            f"got shape {tuple(tensor.shape)}."
        )


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


def _build(file: File, types: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the state that `tensors` make up; raise on unknown types and wrong names."""
    is_model = isinstance(types, dict) and list(types) in ([MODEL], [STACK, "cursor"])
    layers = next(iter(types.values())) if is_model else types
    if not isinstance(layers, list):
        return _kind(file, types).from_tensors(tensors)
    groups: dict[str, dict[str, Tensor]] = {str(place): {} for place in range(len(layers))}
    for name, tensor in tensors.items():
        head, _, rest = name.partition(".")
        place, _, field = rest.partition(".")
        if head == "layers" and place in groups:
            groups[place][field] = tensor
        elif not (is_model and name == "position_b"):
            _refuse(file, f"{name!r} belongs to none of its {len(layers)} layers")
    pairs = zip(layers, groups.values(), strict=True)
    caches = [_kind(file, kind).from_tensors(group) for kind, group in pairs]
    if not is_model:
        return caches
    model = ModelCache(tuple(caches), tensors.get("position_b"))  # pyright: ignore[reportArgumentType]
    return StackCache(*model, _cursor(file, types["cursor"])) if STACK in types else model


def _cursor(file: File, entries: Any) -> Cursor:
    """Return how far registers have come."""
    numbers = entries[1:] if isinstance(entries, list) else []
    counts = numbers if not numbers or entries[0] is None else entries
    if not counts or any(type(number) is not int or number < 0 for number in counts):
        _refuse(file, f"its cursor is {entries!r}")
    return Cursor(entries[0], tuple(numbers))


def _kind(file: File, name: object) -> Any:
    if not isinstance(name, str) or name not in TYPES:
        raise CheckpointError(
            f"load_state: {os.fspath(file)!r} must hold a {MODEL} or any of {', '.join(TYPES)}; "
            f"got {name!r}. It may come from a later anymamba: pip install -U anymamba."
        )
    return TYPES[name]
