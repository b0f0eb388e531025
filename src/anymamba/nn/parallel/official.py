"""Between the parts that ranks hold and tensors under their official names.

A weight that is split is two parameters, `weight_own` and `weight_shared`, whose rows depend on the
number of ranks. Files do not: they hold official tensors. Names may go on behind a slash, as those
of an optimiser's moments do ("in_proj.weight_own/exp_avg"); moments are split like their weights.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from anymamba.errors import CheckpointError
from anymamba.nn.parallel.local import Piece

__all__ = ["fill_tensors", "gather_tensors", "official_shards"]


class _Split(NamedTuple):
    """An official tensor, and under which names its parts go; one for each ending."""

    piece: Piece
    names: dict[str, str]


@torch.no_grad()
def gather_tensors(
    model: nn.Module,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    keep: bool = True,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Return whole tensors under their official names.

    Every rank must call it. Works for models that are split, sharded, both, or neither.

    Args:
        model: what `parallelize` was given.
        tensors: one for each parameter, by its name now, such as gradients; the model's state by
            default.
        keep: whether this rank wants them; else it helps the others and gets an empty dict.
        device: where they are put, one after the other; None leaves them where they are.
    """
    found: dict[str, Tensor] = {}
    for name, value in (model.state_dict() if tensors is None else tensors).items():
        whole = _whole(value)
        if keep:
            found[name] = whole.to(device)
    for name, split in _splits(model, found).items():
        found[name] = split.piece.join({e: found.pop(part) for e, part in split.names.items()})
    return found


@torch.no_grad()
def official_shards(
    model: nn.Module, tensors: Mapping[str, Tensor], line: DeviceMesh | None
) -> dict[str, Tensor]:
    """Return tensors under official names, none of which is whole on one rank longer than needed.

    Every rank must call it. What was split by heads is put together, one tensor at a time, and
    shared out again by its rows. Everything else is returned as it is, and shares its memory.

    Args:
        model: what `parallelize` was given.
        tensors: by the names that its parameters have now.
        line: all ranks on one axis; None is a process alone, where nothing is split.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    found = dict(tensors)
    for name, split in _splits(model, tensors).items():
        parts = {ending: _whole(found.pop(part)) for ending, part in split.names.items()}
        official = split.piece.join(parts)
        if official.dim() > 0:
            assert line is not None
            everywhere = DTensor.from_local(official, line, [Replicate()], run_check=False)
            official = everywhere.redistribute(line, [Shard(0)])
        found[name] = official
    return found


@torch.no_grad()
def fill_tensors(
    model: nn.Module, official: Mapping[str, Tensor], into: Mapping[str, Tensor]
) -> set[str]:
    """Copy official tensors into those that this rank holds.

    Every rank must call it, with the same names in the same order.

    Args:
        model: what `parallelize` was given.
        official: whole tensors or distributed ones.
        into: by the names that the parameters have now; overwritten.

    Returns:
        The names of those that were overwritten.

    Raises:
        CheckpointError: a tensor has no place there, or another shape.
    """
    splits, filled = _splits(model, into), set[str]()
    for name, value in official.items():
        if value is into.get(name):
            filled.add(name)
            continue
        whole = _whole(value)
        parts = {name: whole}
        if name in splits:
            piece, names = splits[name]
            parts = {names[ending]: part for ending, part in piece.parts(whole).items()}
        for key, part in parts.items():
            if key not in into or into[key].shape != part.shape:
                given = f"{tuple(into[key].shape)}" if key in into else "no such tensor"
                raise CheckpointError(
                    f"fill_tensors: the model must have room for {name} {tuple(whole.shape)}: "
                    f"{key} {tuple(part.shape)}; it has {given}. Is it the same model?"
                )
            _copy(part, into[key])
        filled |= parts.keys()
    return filled


def _splits(model: nn.Module, names: Mapping[str, Tensor]) -> dict[str, _Split]:
    """Return the official tensors of which some of these are the parts."""
    pieces: dict[str, tuple[str, str, Piece]] = {}
    for place, module in model.named_modules():
        for weight, piece in module.__dict__.get("pieces", {}).items():
            official = f"{place}.{weight}".lstrip(".")
            pieces |= {official + ending: (official, ending, piece) for ending in piece.rows}
    found: dict[str, _Split] = {}
    for name in names:
        weight, slash, quantity = name.partition("/")
        if weight in pieces:
            official, ending, piece = pieces[weight]
            split = found.setdefault(official + slash + quantity, _Split(piece, {}))
            split.names[ending] = name
    return found


def _whole(value: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def _copy(whole: Tensor, target: Tensor) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    whole = whole.to(target.device)
    if isinstance(target, DTensor):
        mesh = target.device_mesh
        whole = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    target.copy_(whole)
