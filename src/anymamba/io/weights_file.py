"""Weights on disk: safetensors, sharded safetensors, and the official `.bin`.

| file | what |
|---|---|
| `model.safetensors` | all tensors |
| `model.safetensors.index.json` | says which shard holds which tensor |
| `pytorch_model.bin` | what `torch.save` wrote; read with `weights_only`, so no code in it runs |
| `pytorch_model.bin.index.json` | the same as above for `.bin` shards; read, never written |

The first that exists is read. Files are mapped into memory, so a tensor costs nothing until it is
looked at.
"""

import os
import secrets
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from anymamba.errors import CheckpointError, ConfigError
from anymamba.io.disk import read_json, replacing, write_json
from anymamba.io.tensor_file import DTYPES, INTEGERS, write_safetensors

__all__ = [
    "FORMATS",
    "WEIGHT_FILES",
    "ValuesOf",
    "check_format",
    "read_weights",
    "shards_of",
    "write_weights",
]

# Gives the tensors of one file, by name, their values.
ValuesOf = Callable[[dict[str, Tensor]], dict[str, Tensor]]
FORMATS = ("safetensors", "bin")
# What other readers expect to be told.
_METADATA = {"format": "pt"}
_SINGLE = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}
_INDEX = {form: f"{name}.index.json" for form, name in _SINGLE.items()}
# In the order of preference: safetensors cannot hold code, and one file is simpler than many.
WEIGHT_FILES = tuple(name for form in FORMATS for name in (_SINGLE[form], _INDEX[form]))


def read_weights(where: str, directory: Path) -> dict[str, Tensor]:
    """Return the stored tensors by their stored names, mapped into memory, on the CPU.

    Args:
        where: the function that asks; opens every message.
        directory: the checkpoint.

    Raises:
        CheckpointError: there are no weights, they are damaged, or hold more than tensors.
    """
    found = [directory / name for name in WEIGHT_FILES if (directory / name).is_file()]
    if not found:
        raise CheckpointError(
            f"{where}: {str(directory)!r} must hold weights; there is none of "
            f"{', '.join(WEIGHT_FILES)}. Check the path."
        )
    file = found[0]
    if file.suffix != ".json":
        return _read(where, file)
    tensors: dict[str, Tensor] = {}
    listed = _weight_map(where, file)
    for shard in shards_of(where, file):
        for name, tensor in _read(where, directory / shard).items():
            if listed.get(name) != shard:
                _refuse(where, file, f"it does not list {name!r} of {shard!r}")
            tensors[name] = tensor
    if missing := sorted(set(listed) - set(tensors)):
        _refuse(where, file, f"{missing[0]!r} is not in the shard it names")
    return tensors


def shards_of(where: str, index: Path) -> list[str]:
    """Return the file names that an index names, each a plain name of the index's own kind."""
    suffix = index.name.removesuffix(".index.json").rpartition(".")[2]
    shards = sorted(set(_weight_map(where, index).values()))
    for shard in shards:
        # An index comes from a stranger: it must not point out of its own folder.
        if shard != os.path.basename(shard) or "\\" in shard or not shard.endswith(f".{suffix}"):
            _refuse(where, index, f"{shard!r} is no file name for a shard")
    return shards


def check_format(where: str, format: str, max_shard_bytes: int | None) -> None:
    """Raise unless weights can be written that way."""
    if format not in FORMATS:
        raise ConfigError(f"{where}: format must be one of {FORMATS}; got {format!r}.")
    if max_shard_bytes is not None and (format == "bin" or max_shard_bytes < 1):
        raise ConfigError(
            f"{where}: max_shard_bytes must be positive and belongs to safetensors; "
            f"got {max_shard_bytes} with format {format!r}."
        )


def write_weights(
    where: str,
    directory: Path,
    tensors: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    *,
    format: str = "safetensors",
    max_shard_bytes: int | None = None,
    notes: Mapping[str, str] | None = None,
    values_of: ValuesOf | None = None,
) -> None:
    """Write tensors so that a reader sees either the old weights or the new ones.

    Weights of another format, or of more shards, that lay there before are removed at the end,
    because a reader could prefer them.

    Args:
        where: the function that asks; opens every message.
        directory: an existing folder.
        tensors: what to store, by stored name, in this order.
        dtypes: what to store it as; cast file by file.
        format: "safetensors" or "bin".
        max_shard_bytes: cut safetensors into files of at most this size; a larger tensor gets a
            file of its own.
        notes: further text entries for the header of safetensors.
        values_of: asked for the values of one safetensors file when it is written; for tensors
            that are shapes and dtypes until then.

    Raises:
        ConfigError: the options contradict each other.
        CheckpointError: the system refuses.
    """
    check_format(where, format, max_shard_bytes)
    header = {**_METADATA, **(notes or {})}
    old = _present(where, directory)
    if format == "bin":
        file = directory / _SINGLE[format]
        with replacing(where, file) as stream:
            torch.save(_cast(tensors, dtypes), stream)
        new = {file.name}
    else:
        groups = _split(tensors, dtypes, max_shard_bytes)
        new = _write_groups(where, directory, groups, dtypes, header, values_of or dict)
    for name in old:
        if name not in new:
            _remove(where, directory / name)


def _write_groups(
    where: str,
    directory: Path,
    groups: list[dict[str, Tensor]],
    dtypes: Mapping[str, torch.dtype],
    header: Mapping[str, str],
    values_of: ValuesOf,
) -> set[str]:
    if len(groups) == 1:
        file = directory / _SINGLE["safetensors"]
        write_safetensors(where, file, values_of(groups[0]), header, dtypes)
        return {_SINGLE["safetensors"]}
    count = len(groups)
    names = [f"model-{place:05}-of-{count:05}.safetensors" for place in range(1, count + 1)]
    if any((directory / name).exists() for name in names):
        # The old index still names the old shards: they stay until the new index is there.
        tag = secrets.token_hex(4)
        names = [name.replace("model-", f"model-{tag}-", 1) for name in names]
    written: list[Path] = []
    try:
        for name, group in zip(names, groups, strict=True):
            write_safetensors(where, directory / name, values_of(group), header, dtypes)
            written.append(directory / name)
        listed = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        total = sum(_bytes(x, dtypes[key]) for group in groups for key, x in group.items())
        index = {"metadata": {"total_size": total}, "weight_map": listed}
        write_json(where, directory / _INDEX["safetensors"], index)
    except BaseException:
        for file in written:
            file.unlink(missing_ok=True)
        raise
    return {*names, _INDEX["safetensors"]}


def _cast(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    done: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in done:
            value = tensor.detach().to(device="cpu", dtype=dtypes[name]).contiguous()
            # torch.save stores whole storages: a slice must not drag its base along.
            whole = value.untyped_storage().nbytes() == value.nbytes
            done[id(tensor)] = value if whole else value.clone()
    return {name: done[id(tensor)] for name, tensor in tensors.items()}


def _split(
    tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], limit: int | None
) -> list[dict[str, Tensor]]:
    groups: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = _bytes(tensor, dtypes[name])
        if limit is not None and groups[-1] and filled + size > limit:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled += size
    return groups


def _bytes(tensor: Tensor, dtype: torch.dtype) -> int:
    return tensor.numel() * dtype.itemsize


def _present(where: str, directory: Path) -> list[str]:
    """Return the weight files in a folder, indexes before their shards."""
    names = [name for name in WEIGHT_FILES if (directory / name).is_file()]
    for form in FORMATS:
        if _INDEX[form] in names:
            try:
                names += shards_of(where, directory / _INDEX[form])
            except CheckpointError:
                # A damaged index names nothing that could be trusted.
                continue
    return names


def _remove(where: str, file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{where}: the older {str(file)!r} must go, or it would be read instead of the new "
            f"weights; {error}. Remove it by hand."
        ) from error


def _weight_map(where: str, index: Path) -> dict[str, str]:
    listed = read_json(where, index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(x, str) for x in listed.values()):
        _refuse(where, index, "it has no table 'weight_map' from names to files")
    return listed


def _read(where: str, file: Path) -> dict[str, Tensor]:
    tensors = _read_bin(where, file) if file.suffix == ".bin" else _read_safetensors(where, file)
    for name, tensor in tensors.items():
        if not isinstance(name, str) or type(tensor) not in (Tensor, nn.Parameter):
            kind = type(tensor).__name__
            _refuse(where, file, f"{name!r} is a {kind}, where only named tensors may stand")
        kinds = INTEGERS if name.endswith(".values") else DTYPES
        if tensor.dtype not in kinds or tensor.layout != torch.strided:
            _refuse(where, file, f"{name!r} is {tensor.dtype}, {tensor.layout}: no plain weights")
    return tensors


def _read_safetensors(where: str, file: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(
            f"{where}: the package safetensors must be installed; it cannot be imported. "
            "Run: pip install 'anymamba[io]'"
        ) from error
    try:
        with safe_open(os.fspath(file), framework="pt", device="cpu") as reader:
            return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        _refuse(where, file, f"it is damaged, or no safetensors file ({error})", error)


def _read_bin(where: str, file: Path) -> dict[str, Tensor]:
    try:
        # Files from before torch 1.6 are no archives and cannot be mapped.
        mapped = zipfile.is_zipfile(file)
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    # A damaged pickle can raise anything; whatever it is, the file is at fault.
    except Exception as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        _refuse(where, file, f"torch.load refuses it: damaged, or more than tensors ({why})", error)
    if not isinstance(content, dict):
        _refuse(where, file, f"it holds a {type(content).__name__}, no dictionary of tensors")
    return dict(content)


def _refuse(where: str, file: Path, why: str, cause: BaseException | None = None) -> NoReturn:
    raise CheckpointError(
        f"{where}: {str(file)!r} must be a whole weights file; {why}. Use a copy of the original."
    ) from cause
