"""Checkpoints: a language model from a folder or the hub, and back to a folder."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anymamba.errors import CheckpointError, ConfigError
from anymamba.io.config_file import choose_activation, describe, write_config
from anymamba.io.device import usable_device
from anymamba.io.hub import locate
from anymamba.io.layouts import (
    check_layout,
    note_groups,
    official_names,
    to_transformers,
    transformers_names,
)
from anymamba.io.match import EMBEDDING, HEAD, check_match, filled, skeleton
from anymamba.io.quantized import (
    LAYOUT,
    LAYOUT_KEY,
    SCHEME_KEY,
    expected_tensors,
    fill_quantized,
    quantized_outline,
    stored_scheme,
    whole_scheme,
)
from anymamba.io.tensor_file import DTYPES, INTEGERS
from anymamba.io.weights_file import ValuesOf, check_format, read_weights, write_weights
from anymamba.models import MambaConfig, MambaLM, scheme_of
from anymamba.nn import check_scheme

__all__ = ["CheckpointService", "load_pretrained", "save_pretrained"]

Folder = str | os.PathLike[str]


def load_pretrained(
    name_or_dir: Folder,
    *,
    revision: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    a_activation: str | None = None,
    quantize: str | None = None,
    cache_dir: Folder | None = None,
    local_files_only: bool = False,
) -> MambaLM:
    """Load a language model: official `.bin`, safetensors, shards, or transformers' layout.

    Files are mapped into memory and every tensor is copied once, in its final dtype and place. No
    code that a file may hold is run. The model owns its memory: the files may change afterwards.

    Args:
        name_or_dir: a folder, or a name on the hub; an existing folder is never looked up there.
        revision: branch, tag, commit or reference on the hub, such as `refs/pr/1`.
        device: of the parameters; torch's default device when omitted.
        dtype: of the parameters; torch's default dtype when omitted, whatever the file has.
            Sensitive parameters stay float32 beside half types.
        a_activation: Mamba-3: "heavy_tail" or "softplus"; official configs do not tell.
        quantize: "int8" or "int4": projections, embedding and head become integers, one tensor at
            a time; a checkpoint that is quantised already says so itself.
        cache_dir: where the hub's cache lies, if not in its usual place.
        local_files_only: never use the network.

    Raises:
        CheckpointError: no such checkpoint, a damaged one, or weights that do not fit the config.
        ConfigError: options that contradict the checkpoint, or a device that cannot be used.

    Example:
        >>> import tempfile
        >>> lm = MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=16))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_pretrained(lm, folder)
        ...     again = load_pretrained(folder)
        >>> torch.equal(lm(torch.tensor([[1, 2]])), again(torch.tensor([[1, 2]])))
        True
    """
    where = "load_pretrained"
    check_dtype(where, dtype)
    if quantize is not None:
        check_scheme(where, quantize)
    place = usable_device(where, device)
    directory = locate(
        where,
        name_or_dir,
        revision=revision,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
    )
    config, stored = read_checkpoint(where, directory, a_activation)
    scheme = stored_scheme(where, directory)
    model = skeleton(where, directory, config, len(stored), dtype)
    model = quantized_outline(where, model, scheme, quantize)
    check_match(where, directory, config, expected_tensors(model, scheme), stored)
    _fill(model, stored, place)
    return model


def save_pretrained(
    model: MambaLM,
    directory: Folder,
    *,
    layout: str = "official",
    format: str = "safetensors",
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Write weights, `anymamba.json` and `config.json` to a folder.

    Each file appears whole or not at all, weights first. Weights of another format that lie in the
    folder are removed when the new ones are there. `mamba_ssm` itself reads layout "official" in
    format "bin" only.

    Args:
        model: any values, on any device but meta.
        directory: where to; created if missing.
        layout: "official", or "transformers" for models that exist there.
        format: "safetensors", or "bin" for `torch.save`.
        dtype: store in this dtype, sensitive parameters in float32 beside half types; as they are
            when omitted.
        max_shard_bytes: cut safetensors into files of at most this size.

    Raises:
        CheckpointError: the model has no values, foreign parameters or no place in that layout, is
            quantised in parts, or the system refuses.
        ConfigError: options that contradict each other.
    """
    where = "save_pretrained"
    check_dtype(where, dtype)
    folder = Path(directory)
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    if any(tensor.is_meta for tensor in tensors.values()):
        raise CheckpointError(f"{where}: the model must have values; it lives on the meta device.")
    scheme = whole_scheme(where, model)
    outline = skeleton(where, folder, model.config, len(tensors), dtype)
    expected = expected_tensors(quantized_outline(where, outline, scheme, None), scheme)
    if scheme is not None and model.config.tie_embeddings:
        del tensors["lm_head.values"], tensors["lm_head.scales"]
    check_match(where, folder, model.config, expected, tensors)
    write_checkpoint(
        where,
        folder,
        model.config,
        tensors,
        None if dtype is None else {name: value.dtype for name, value in expected.items()},
        layout=layout,
        format=format,
        max_shard_bytes=max_shard_bytes,
        scheme=scheme,
    )


class CheckpointService:
    """What `MambaLM.from_pretrained` and `MambaLM.save_pretrained` call."""

    def load(self, name: Folder, **options: Any) -> MambaLM:
        """Load a model; see `load_pretrained`."""
        return load_pretrained(name, **options)

    def save(self, model: MambaLM, directory: Folder, **options: Any) -> None:
        """Save a model; see `save_pretrained`."""
        save_pretrained(model, directory, **options)


def read_checkpoint(
    where: str, directory: Path, a_activation: str | None
) -> tuple[MambaConfig, dict[str, Tensor]]:
    """Return the config, the activation of A decided, and the tensors under official names."""
    config, layout = describe(where, directory)
    config = choose_activation(where, directory, config, a_activation)
    note_groups(where, config, layout)
    stored = read_weights(where, directory)
    return config, official_names(stored) if layout == "transformers" else stored


def write_checkpoint(
    where: str,
    directory: Path,
    config: MambaConfig,
    tensors: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype] | None,
    *,
    layout: str,
    format: str,
    max_shard_bytes: int | None,
    tokens: dict[str, Any] | None = None,
    scheme: str | None = None,
    values_of: ValuesOf | None = None,
) -> None:
    """Write tensors with official names as a checkpoint of `layout`.

    Args:
        where: the function that asks; opens every message.
        directory: where to; created if missing.
        config: of the model.
        tensors: exactly the model's, a tied head or not.
        dtypes: what to store them as; as they are when None.
        layout: "official" or "transformers".
        format: "safetensors" or "bin".
        max_shard_bytes: of one safetensors file.
        tokens: special token ids for a transformers config.
        scheme: how the tensors are quantised; None if they are not.
        values_of: as for `write_weights`.
    """
    check_layout(where, layout)
    check_format(where, format, max_shard_bytes)
    if scheme is not None and (layout, format) != ("official", "safetensors"):
        raise ConfigError(
            f"{where}: quantised weights are stored in layout 'official' and format 'safetensors'; "
            f"got {layout!r} and {format!r}. Other readers need floating point."
        )
    if layout == "transformers":
        # Before anything is written: the model may not exist there.
        to_transformers(where, config)
        note_groups(where, config, layout)
    for name, tensor in tensors.items():
        kinds = INTEGERS if scheme is not None and name.endswith(".values") else DTYPES
        if (dtypes or {name: tensor.dtype})[name] not in kinds:
            raise CheckpointError(
                f"{where}: weights must have one of {', '.join(map(str, DTYPES))}; {name} is "
                f"{tensor.dtype}. Pass dtype=torch.float32."
            )
    kept = dict(tensors)
    if config.tie_embeddings:
        kept.pop(HEAD, None)
        if format == "bin":
            # Official loaders insist on the name; sharing the storage makes it free.
            kept[HEAD] = kept[EMBEDDING]
    stored_as = {name: (dtypes or {name: x.dtype})[name] for name, x in kept.items()}
    if layout == "transformers":
        kept, stored_as = transformers_names(kept), transformers_names(stored_as)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{where}: {str(directory)!r} must be a folder; {error}. Choose another place."
        ) from error
    notes = {} if scheme is None else {SCHEME_KEY: scheme, LAYOUT_KEY: LAYOUT}
    write_weights(
        where,
        directory,
        kept,
        stored_as,
        format=format,
        max_shard_bytes=max_shard_bytes,
        notes=notes,
        values_of=values_of,
    )
    write_config(where, directory, config, layout, tokens or {})


def _fill(model: MambaLM, stored: Mapping[str, Tensor], device: torch.device) -> None:
    """Give a model without values its own copies of the stored ones, one tensor at a time."""
    parameters = filled(model, stored, device)
    if model.config.tie_embeddings and EMBEDDING in parameters:
        parameters[HEAD] = parameters[EMBEDDING]
    is_quantized = scheme_of(model) is not None
    # The buffers of quantised layers follow below.
    model.load_state_dict(parameters, assign=True, strict=not is_quantized)
    if is_quantized:
        fill_quantized(model, stored, device)
    model.tie_weights()


def check_dtype(where: str, dtype: torch.dtype | None) -> None:
    """Raise unless weights can be stored in that dtype."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(
            f"{where}: dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype}."
        )
