"""Everything of a run that changes, taken down in a checkpoint and taken up again.

Weights and moments are written under official names and shapes, whoever held which part of them. So
a process alone and any number of ranks, split or sharded in any way, go on from each other.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anymamba.errors import CheckpointError
from anymamba.models import MambaLM
from anymamba.nn import fill_tensors, official_shards
from anymamba.train.batches import Batches
from anymamba.train.checkpoint import CheckpointFolder, Snapshot
from anymamba.train.guard import Guard
from anymamba.train.learner import Learner
from anymamba.train.optim import TrainOptimizer
from anymamba.train.rank_learner import RankLearner
from anymamba.train.ranks import Ranks
from anymamba.train.sharded_checkpoint import load_shards, save_shards

__all__ = ["Progress", "RunState"]

WHERE = "train"


@dataclass
class Progress:
    """Counters of a run; the sums reach back to the last report."""

    step: int = 0
    tokens: int = 0
    bytes: float = 0.0
    seconds: float = 0.0
    sum_steps: int = 0
    sum_loss: float = 0.0
    sum_nats: float = 0.0
    sum_bytes: float = 0.0
    grad_norm: float = 0.0


@dataclass
class RunState:
    """What a step changes, together with the ranks that hold it."""

    ranks: Ranks
    lm: MambaLM
    learner: Learner | RankLearner
    optimizer: TrainOptimizer
    batches: Batches
    guard: Guard
    progress: Progress = field(default_factory=Progress)

    def save(self, folder: CheckpointFolder) -> Path:
        """Write a checkpoint, all ranks together; returns its folder.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written.
        """
        optimizer, line = self.optimizer.state_dict(), self.ranks.line
        shards = {
            "model": official_shards(self.lm, self.lm.state_dict(), line),
            "optimizer": official_shards(self.lm, optimizer["tensors"], line),
        }
        is_sharded = self.ranks.mesh is not None
        tensors: dict[str, Any] = {"random": random_state()} | ({} if is_sharded else shards)
        if carried := self.learner.state_tensors():
            tensors["carried"] = carried
        facts = {
            "optimizer": optimizer["values"] | {"tensors": len(shards["optimizer"])},
            "data": self.batches.state_dict(),
            "guard": self.guard.state_dict(),
            "progress": asdict(self.progress),
        } | ({"sharded": True} if is_sharded else {})
        snapshot = Snapshot(step=self.progress.step, tensors=tensors, facts=facts)
        if is_sharded:
            return save_shards(folder, snapshot, shards, self.ranks)
        return folder.save(snapshot)

    def restore(self, folder: CheckpointFolder, step: int) -> None:
        """Take up a checkpoint, whoever wrote it.

        Raises:
            CheckpointError: it is damaged, or of another model or optimiser.
        """
        found = folder.load(step)
        facts = found.facts
        model, moments = self.lm.state_dict(), self.optimizer.empty_tensors()
        written = found.tensors
        if facts.get("sharded"):
            line = self.ranks.line
            written = load_shards(
                folder.path(step),
                self.ranks,
                official_shards(self.lm, model, line),
                official_shards(self.lm, moments, line),
            )
        if missing := model.keys() - fill_tensors(self.lm, written["model"], model):
            raise CheckpointError(
                f"{WHERE}: {str(folder.path(step))!r} must hold the whole model; {min(missing)} is "
                "not there. Restore the recipe of the run."
            )
        held = fill_tensors(self.lm, written["optimizer"], moments)
        _check_count(facts["optimizer"]["tensors"], len(written["optimizer"]))
        self.optimizer.load_state_dict(
            {
                "tensors": {name: moments[name] for name in held},
                "values": facts["optimizer"] | {"tensors": len(held)},
            }
        )
        self.learner.load_state_tensors(found.tensors.get("carried", {}))
        self.batches.load_state_dict(facts["data"])
        self.guard.load_state_dict(facts["guard"])
        self.progress = Progress(**facts["progress"])
        restore_random(found.tensors["random"])


def _check_count(expected: int, given: int) -> None:
    if expected != given:
        raise CheckpointError(
            f"{WHERE}: the optimiser's state must hold all of its {expected} tensors; got {given}. "
            "Use an older checkpoint."
        )


def random_state() -> dict[str, Tensor]:
    """Return the state of torch's random numbers, of every device that has one."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random(states: Mapping[str, Tensor]) -> None:
    """Go on drawing where `random_state` was taken; devices that are gone draw nothing."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state, name)
