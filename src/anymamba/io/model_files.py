"""Folders of models that are no language models: `config.json` names the class.

| file | what |
|---|---|
| `config.json` | `{"anymamba_model": class, "version": who wrote it, "config": its config}` |
| `model.safetensors` | the parameters by their names, sharded if asked |
"""

import os
from pathlib import Path
from typing import Any, TypeVar

import torch

from anymamba.errors import AnyMambaError, CheckpointError
from anymamba.io.checkpoint import check_dtype, load_pretrained
from anymamba.io.config_file import WRONG_VALUES
from anymamba.io.device import usable_device
from anymamba.io.disk import read_json, write_json
from anymamba.io.hub import locate
from anymamba.io.match import check_names, filled, outline
from anymamba.io.tensor_file import DTYPES
from anymamba.io.weights_file import check_format, read_weights, write_weights
from anymamba.models import STORED_MODELS, MambaLM, StoredModel
from anymamba.version import __version__

__all__ = ["ModelFolders", "load_model", "save_model"]

Folder = str | os.PathLike[str]
StoredT = TypeVar("StoredT", bound=StoredModel)
_KIND = "anymamba_model"


def save_model(
    model: StoredModel,
    directory: Folder,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Write the weights and the config of a model to a folder; language models save themselves.

    Each file appears whole or not at all, weights first.

    Args:
        model: any values, on any device but meta.
        directory: where to; created if missing.
        dtype: store in this dtype, sensitive parameters in float32 beside half types; as they are
            when omitted.
        max_shard_bytes: cut the weights into files of at most this size.

    Raises:
        CheckpointError: the model has no values or foreign parameters, or the system refuses.
        ConfigError: an option is out of range.
    """
    where = "save_model"
    check_dtype(where, dtype)
    check_format(where, "safetensors", max_shard_bytes)
    kind = type(model).__name__
    if STORED_MODELS.get(kind) is not type(model):
        raise CheckpointError(
            f"{where}: the model must be one of {', '.join(sorted(STORED_MODELS))}; got {kind}."
        )
    folder = Path(directory)
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    if any(tensor.is_meta for tensor in tensors.values()):
        raise CheckpointError(f"{where}: the model must have values; it lives on the meta device.")
    expected = _outline(where, folder, type(model), model.config, dtype).state_dict()
    check_names(where, folder, f"{kind} with this config", expected, tensors, {})
    stored_as = {
        name: (x if dtype is None else expected[name]).dtype for name, x in tensors.items()
    }
    for name, stored in stored_as.items():
        if stored not in DTYPES:
            raise CheckpointError(
                f"{where}: weights must have one of {', '.join(map(str, DTYPES))}; {name} is "
                f"{stored}. Pass dtype=torch.float32."
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{where}: {str(folder)!r} must be a folder; {error}. Choose another place."
        ) from error
    write_weights(where, folder, tensors, stored_as, max_shard_bytes=max_shard_bytes)
    entries = {_KIND: kind, "version": __version__, "config": model.config.to_dict()}
    write_json(where, folder / "config.json", entries)


def load_model(
    name_or_dir: Folder,
    *,
    revision: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    cache_dir: Folder | None = None,
    local_files_only: bool = False,
    **options: Any,
) -> StoredModel | MambaLM:
    """Load whatever model a folder or a name on the hub holds.

    Args:
        name_or_dir: a folder, or a name on the hub; an existing folder is never looked up there.
        revision: branch, tag, commit or reference on the hub.
        device: of the parameters; torch's default device when omitted.
        dtype: of the parameters; torch's default dtype when omitted, whatever the file has.
        cache_dir: where the hub's cache lies, if not in its usual place.
        local_files_only: never use the network.
        **options: further ones of `load_pretrained`, if it is a language model.

    Raises:
        CheckpointError: no such checkpoint, a damaged one, or weights that do not fit the config.
        ConfigError: options that contradict the checkpoint.
    """
    where = "load_model"
    check_dtype(where, dtype)
    directory = locate(
        where,
        name_or_dir,
        revision=revision,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
    )
    entries = read_json(where, directory / "config.json")
    if _KIND not in entries:
        return load_pretrained(directory, device=device, dtype=dtype, **options)
    if given := sorted(name for name, value in options.items() if value is not None):
        raise CheckpointError(
            f"{where}: {', '.join(given)} belongs to language models; {str(directory)!r} holds a "
            f"{entries[_KIND]}. Leave it out."
        )
    return _load(where, directory, entries, device, dtype)


class ModelFolders:
    """What `from_pretrained` and `save_pretrained` of stored models call."""

    def load(self, kind: type[StoredT], name: Folder, **options: Any) -> StoredT:
        """Load a model of one class; see `load_model`."""
        model = load_model(name, **options)
        if not isinstance(model, kind):
            raise CheckpointError(
                f"{kind.__name__}.from_pretrained: {str(name)!r} must hold a {kind.__name__}; it "
                f"holds a {type(model).__name__}. Use {type(model).__name__}.from_pretrained."
            )
        return model

    def save(self, model: StoredModel, directory: Folder, **options: Any) -> None:
        """Save a model; see `save_model`."""
        save_model(model, directory, **options)


def _load(
    where: str,
    directory: Path,
    entries: dict[str, Any],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> StoredModel:
    place = usable_device(where, device)
    file = str(directory / "config.json")
    kind = STORED_MODELS.get(entries[_KIND]) if isinstance(entries[_KIND], str) else None
    if kind is None:
        raise CheckpointError(
            f"{where}: {_KIND} in {file!r} must be one of {', '.join(sorted(STORED_MODELS))}; got "
            f"{entries[_KIND]!r}. Perhaps a newer version of anymamba wrote it."
        )
    try:
        config = kind.config_type.from_dict(entries["config"])  # pyright: ignore[reportAttributeAccessIssue]
    except (AnyMambaError, *WRONG_VALUES) as error:
        raise CheckpointError(
            f"{where}: {file!r} must describe a {kind.__name__}; {error} Correct it, or use a copy."
        ) from error
    stored = read_weights(where, directory)
    model = _outline(where, directory, kind, config, dtype)
    check_names(
        where, directory, f"{kind.__name__} with this config", model.state_dict(), stored, {}
    )
    model.load_state_dict(filled(model, stored, place), assign=True)
    return model


def _outline(
    where: str, directory: Path, kind: type[StoredModel], config: Any, dtype: torch.dtype | None
) -> StoredModel:
    def build() -> StoredModel:
        return kind(config, device="cpu", dtype=dtype)

    return outline(where, directory, build)
