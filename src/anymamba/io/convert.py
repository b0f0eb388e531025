"""Conversion of checkpoints between layouts, formats and dtypes, without building the model."""

import os
import shutil
from pathlib import Path

import torch

from anymamba.errors import CheckpointError, ConfigError
from anymamba.io.checkpoint import Folder, check_dtype, read_checkpoint, write_checkpoint
from anymamba.io.disk import read_json, replacing
from anymamba.io.hub import TEXT_FILES, locate
from anymamba.io.match import check_match, skeleton
from anymamba.io.quantized import (
    expected_tensors,
    quantized_outline,
    quantizing,
    stored_scheme,
)
from anymamba.nn import check_scheme

__all__ = ["convert_checkpoint"]

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def convert_checkpoint(
    source: Folder,
    target: Folder,
    *,
    layout: str = "official",
    format: str = "safetensors",
    dtype: torch.dtype | None = None,
    a_activation: str | None = None,
    quantize: str | None = None,
    max_shard_bytes: int | None = None,
    revision: str | None = None,
    cache_dir: Folder | None = None,
    local_files_only: bool = False,
) -> None:
    """Rewrite a checkpoint in another layout, format or dtype; tokenizer files come along.

    Tensors go from the mapped source to the target file by file. What keeps its dtype takes no
    memory; what is cast or quantised is held until its file is written, so `max_shard_bytes` bounds
    it (format "bin" holds one copy of all). Without `dtype` and `quantize` every bit is kept.

    Args:
        source: a folder, or a name on the hub.
        target: another folder; created if missing.
        layout: "official", or "transformers" for models that exist there.
        format: "safetensors", or "bin" for `torch.save`.
        dtype: store in this dtype, sensitive parameters in float32 beside half types; as they are
            stored when omitted. Not for a source that is quantised: its integers stay.
        a_activation: Mamba-3: "heavy_tail" or "softplus", where the source does not tell.
        quantize: "int8" or "int4": store projections, embedding and head as integers.
        max_shard_bytes: cut safetensors into files of at most this size.
        revision: branch, tag, commit or reference on the hub.
        cache_dir: where the hub's cache lies, if not in its usual place.
        local_files_only: never use the network.

    Raises:
        CheckpointError: the source is missing or damaged, the model does not exist in that layout,
            or the system refuses.
        ConfigError: options that contradict the checkpoint or each other.
    """
    where = "convert_checkpoint"
    check_dtype(where, dtype)
    if quantize is not None:
        check_scheme(where, quantize)
    start = locate(
        where,
        source,
        revision=revision,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        optional=TEXT_FILES,
    )
    goal = Path(target)
    if goal.exists() and os.path.samefile(start, goal):
        raise CheckpointError(
            f"{where}: the target must be another folder than the source; both are "
            f"{str(goal)!r}. Name a new folder."
        )
    config, stored = read_checkpoint(where, start, a_activation)
    scheme = stored_scheme(where, start)
    if scheme is not None and dtype is not None:
        raise ConfigError(
            f"{where}: dtype is for weights in floating point; those in {str(start)!r} are "
            f"{scheme} and would stay integers. Leave it out, or convert the original model."
        )
    model = skeleton(where, start, config, len(stored), dtype)
    model = quantized_outline(where, model, scheme, quantize)
    check_match(where, start, config, expected_tensors(model, scheme), stored)
    is_new = scheme is None and quantize is not None
    scheme = scheme or quantize
    expected = expected_tensors(model, scheme)
    entries = read_json(where, start / "config.json")
    write_checkpoint(
        where,
        goal,
        config,
        # The order of the model, so that shards hold whole layers.
        {name: stored.get(name, outline) for name, outline in expected.items()},
        None if dtype is None else {name: value.dtype for name, value in expected.items()},
        layout=layout,
        format=format,
        max_shard_bytes=max_shard_bytes,
        tokens={name: entries[name] for name in _TOKENS if name in entries},
        scheme=scheme,
        values_of=quantizing(stored, model) if is_new else None,
    )
    for name in TEXT_FILES:
        if (start / name).is_file():
            with open(start / name, "rb") as old, replacing(where, goal / name) as new:
                shutil.copyfileobj(old, new)
