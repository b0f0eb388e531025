"""The model over several ranks as the loop sees it: the loss of a batch that all of them share."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from anymamba.errors import ConfigError
from anymamba.models import LanguageLoss, MambaLM, recompute_layers
from anymamba.nn import parallelize
from anymamba.ops import IGNORE
from anymamba.train.batches import Batch
from anymamba.train.recipe_sections import Recipe

__all__ = ["RankLearner", "part_of"]


class RankLearner:
    """Computes losses of packed batches; every rank is given the whole batch and takes its part.

    Along "dp" sequences are shared out, along "cp" the tokens of what a rank has. The loss is the
    mean over the batch, so a run does not depend on the number of ranks, but for rounding.

    Args:
        lm: the model; changed in place.
        recipe: how it is spread, autocast and recomputation.
        mesh: of all ranks.

    Raises:
        ConfigError: the recipe asks for what several ranks do not offer.
    """

    def __init__(self, lm: MambaLM, recipe: Recipe, mesh: DeviceMesh) -> None:
        """Spread the model."""
        loop, how = recipe.loop, recipe.parallel
        _check(recipe, mesh)
        self.lm, self._autocast_name = lm, loop.autocast
        if loop.checkpoint_activations:
            recompute_layers(lm)
        self._rows, self._row = mesh["dp"].size(), mesh["dp"].get_local_rank()
        names = mesh.mesh_dim_names or ()
        self._parts = mesh["cp"].size() if "cp" in names else 1
        dtype = torch.bfloat16 if how.param_dtype == "bfloat16" else None
        self._loss = parallelize(LanguageLoss(lm, mesh), mesh, shard=how.shard, param_dtype=dtype)

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch, the same on every rank."""
        ids, targets, borders = part_of(batch, self._row, self._rows, self._parts)
        with self._autocast():
            return self._loss(ids, targets, cu_seqlens=borders)

    def forget(self) -> None:
        """Drop the carried state; packed batches carry none."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the carried state; packed batches carry none."""
        return {}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up the result of `state_tensors`."""
        if tensors:
            raise ConfigError("train: a carried state cannot be taken up by several ranks.")

    def _autocast(self) -> AbstractContextManager[Any]:
        device = self.lm.backbone.embedding.weight.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self._autocast_name == "bfloat16")


def _check(recipe: Recipe, mesh: DeviceMesh) -> None:
    if recipe.data.mode != "packed":
        raise ConfigError(
            f"data: several ranks train on packed sequences; got mode={recipe.data.mode!r}. "
            "Set data.mode='packed'."
        )
    if recipe.loop.compile:
        raise ConfigError("loop: compile is not offered on several ranks. Set loop.compile=false.")
    is_split = recipe.parallel.shard or "tp" in (mesh.mesh_dim_names or ())
    if recipe.optim.name == "muon" and is_split:
        raise ConfigError(
            "optim: muon needs whole matrices on every rank; got parallel.shard or parallel.tp. "
            "Set optim.name='adamw'."
        )


def part_of(batch: Batch, row: int, rows: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sequences of a packed batch that fall to one of `rows` ranks.

    A sequence falls to the rank in whose share of the tokens it begins. The row is filled up with
    tokens that count nothing, so that `parts` divides it and each part holds a convolution's width.

    Args:
        batch: packed.
        row: whose part.
        rows: how many ranks share the sequences.
        parts: how many ranks share the tokens of a row.

    Returns:
        ids, targets and borders.

    Example:
        >>> ids = torch.arange(10)[None]
        >>> batch = Batch(ids, ids, torch.tensor([0, 4, 7, 10]), None, None, 0.0)
        >>> part_of(batch, 1, 2, 1)[0]
        tensor([[7, 8, 9]])
    """
    assert batch.cu_seqlens is not None
    total = batch.ids_bs.shape[1]
    borders = batch.cu_seqlens.tolist()
    begin, end = row * total / rows, (row + 1) * total / rows
    mine = [place for place, border in enumerate(borders[:-1]) if begin <= border < end]
    inside = borders[mine[0] : mine[-1] + 2] if mine else [0]
    start, stop = inside[0], inside[-1]
    # Room for the usual convolution in each part; a rank without a sequence has filling only.
    narrowest = 8 * parts if parts > 1 else 1
    missing = max(0, narrowest - (stop - start))
    missing += -(stop - start + missing) % parts
    ids = torch.nn.functional.pad(batch.ids_bs[:, start:stop], (0, missing))
    targets = torch.nn.functional.pad(batch.targets_bs[:, start:stop], (0, missing), value=IGNORE)
    inside = [border - start for border in inside]
    if missing:
        inside.append(stop - start + missing)
    return ids, targets, torch.tensor(inside, device=batch.cu_seqlens.device)
