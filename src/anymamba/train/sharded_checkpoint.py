"""Checkpoints that every rank writes its share of, with `torch.distributed.checkpoint`.

They lie in the same numbered folders, as `shards/`, and the same manifest covers them. Tensors are
found by their names and whole shapes, so another number of ranks can read them, or one process.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from anymamba.errors import CheckpointError
from anymamba.train.checkpoint import CheckpointFolder, Snapshot
from anymamba.train.ranks import Ranks

__all__ = ["load_shards", "save_shards"]

SHARDS = "shards"
Groups = Mapping[str, Mapping[str, Tensor]]


def save_shards(folder: CheckpointFolder, snapshot: Snapshot, shards: Groups, ranks: Ranks) -> Path:
    """Write a checkpoint together; it appears whole or not at all. Returns its folder.

    Args:
        folder: of the run.
        snapshot: what the first rank writes alone.
        shards: groups of named tensors of which every rank holds its part.
        ranks: all of them.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written.
    """
    hidden = ranks.ask_first(lambda: folder.begin(snapshot.step))
    if hidden is None:
        return folder.path(snapshot.step)
    try:
        save({name: dict(group) for name, group in shards.items()}, checkpoint_id=hidden / SHARDS)
    except CheckpointException as error:
        raise CheckpointError(
            f"save_shards: {str(hidden.parent)!r} must be writable and have room; {error}. "
            "Older checkpoints are untouched: make room, then resume."
        ) from error
    return ranks.ask_first(lambda: folder.finish(hidden, snapshot))


def load_shards(
    folder: Path,
    ranks: Ranks,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
) -> dict[str, dict[str, Tensor]]:
    """Read what `save_shards` wrote into tensors like those of this run.

    Args:
        folder: of the checkpoint.
        ranks: all of them, however many wrote it.
        model: the model's state by official names, which is overwritten.
        optimizer: tensors for everything that an optimiser may hold, which are overwritten.

    Returns:
        The groups "model" and "optimizer", the latter with what there is.

    Raises:
        CheckpointError: a tensor has another name or shape there.
    """
    reader = FileSystemReader(folder / SHARDS)
    known = reader.read_metadata().state_dict_metadata
    held = {n: x for n, x in optimizer.items() if f"optimizer.{n}" in known}
    state: dict[str, Any] = {"model": dict(model), "optimizer": held}
    unknown = [n for n in known if n.startswith("model.") and n.removeprefix("model.") not in model]
    missing = [n for n in model if f"model.{n}" not in known]
    if unknown or missing:
        raise CheckpointError(
            f"load_shards: {str(folder)!r} must hold the tensors of this model; "
            f"{(unknown or missing)[0]!r} is on one side only. Restore the recipe of the run."
        )
    try:
        with warnings.catch_warnings():
            # A process alone is what is meant here.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(state, storage_reader=reader, no_dist=ranks.mesh is None)
    except (CheckpointException, ValueError) as error:
        raise CheckpointError(
            f"load_shards: {str(folder)!r} must hold tensors of this model's shapes; {error}. "
            "Restore the recipe of the run."
        ) from error
    return state
