"""Training that resumes: what a study does inside a cell.

The batches of a training run are a function of seed and step (`seeded`), so an interrupted run that
goes on from its checkpoint ends with the same weights as one in a single go.
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# A turn of Mamba-3 is a step size times an angle: with the default, 0.001 to 0.1, a model begins
# with turns of nearly nothing.
LARGE_STEPS = {"dt_min": 0.1, "dt_max": 1.0}
SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_CHECKPOINTS = 30.0


class StudyError(ValueError):
    """What is stored does not belong to the setting that is asked for, or a helper failed."""


def seeded(*numbers: int) -> torch.Generator:
    """Return a random generator that depends on all of the numbers, such as seed and step."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 0x9E3779B97F4A7C15 + number + 1) % 2**63
    return torch.Generator().manual_seed(mixed)


class Run:
    """One cell while it is computed: its checkpoint, its clock and its progress line."""

    def __init__(self, key: str, setting: dict[str, Any], checkpoint: Path) -> None:
        """Remember where checkpoints go; nothing is read before `restore`."""
        self.key, self.setting, self.checkpoint = key, setting, checkpoint
        self.began = self.said = self.kept = time.monotonic()
        self.worked = time.process_time()

    @property
    def folder(self) -> Path:
        """Where a cell that keeps more than a checkpoint may do so, until its result is stored."""
        return self.checkpoint.with_suffix("")

    def clear(self) -> None:
        """Remove what only an unfinished cell needs."""
        self.checkpoint.unlink(missing_ok=True)
        if self.folder.exists():
            shutil.rmtree(self.folder)

    @property
    def seconds(self) -> float:
        """Time spent on this cell, before and after interruptions."""
        return time.monotonic() - self.began

    @property
    def cpu_seconds(self) -> float:
        """Processor time spent on it: what remains the same on a busy machine."""
        return time.process_time() - self.worked

    def say(self, text: str) -> None:
        """Print a line, unless the last one was a moment ago."""
        if time.monotonic() - self.said > SECONDS_BETWEEN_LINES:
            self.said = time.monotonic()
            print(f"{self.key}: {text}, {self.seconds:.0f} s", flush=True)

    def restore(self, model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
        """Go back to the last checkpoint; returns its notes, or nothing at the beginning.

        Raises:
            StudyError: the checkpoint was made with another setting.
        """
        if not self.checkpoint.exists():
            return {}
        saved = torch.load(self.checkpoint, weights_only=True)
        if saved["setting"] != self.setting:
            raise StudyError(
                f"{self.checkpoint}: {self.key!r} was begun with {saved['setting']}, and now "
                f"{self.setting} is asked for. Give the flags of that run, or remove the file."
            )
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        self.began -= saved["seconds"]
        self.worked -= saved["cpu_seconds"]
        return saved["notes"]

    def keep(
        self, model: nn.Module, optimiser: torch.optim.Optimizer, notes: dict[str, Any]
    ) -> None:
        """Write a checkpoint, unless the last one was a moment ago."""
        if time.monotonic() - self.kept < SECONDS_BETWEEN_CHECKPOINTS:
            return
        self.kept = time.monotonic()
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        whole = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
        beside = self.checkpoint.with_suffix(".part")
        spent = {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
        torch.save({**whole, **spent, "setting": self.setting, "notes": notes}, beside)
        os.replace(beside, self.checkpoint)


class Schedule(NamedTuple):
    """How long a training run is and how it is watched."""

    steps: int
    learning_rate: Callable[[int], float]
    evaluate_every: int
    clip: float = 1.0


def train(
    run: Run,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    schedule: Schedule,
    loss_at: Callable[[int], Tensor],
    evaluate: Callable[[int], dict[str, float]],
    enough: Callable[[dict[str, float]], bool] = lambda measures: False,
    before_step: Callable[[int], None] = lambda step: None,
) -> list[dict[str, float]]:
    """Train, from the last checkpoint if there is one.

    Args:
        run: the cell.
        model: to train; its initial weights are the caller's business.
        optimiser: of its parameters.
        schedule: steps, learning rate and watching.
        loss_at: the loss of a step, on data that only the step decides.
        evaluate: measures after a step.
        enough: whether measures are good enough to stop early.
        before_step: called first in every step, such as to average weights; whatever it changes has
            to be part of `model`, or an interrupted run would lose it.

    Returns:
        The measures in order, each with its `step` and the mean `loss` since the one before.
    """
    notes = run.restore(model, optimiser) or {"step": 0, "history": [], "losses": []}
    history: list[dict[str, float]] = notes["history"]
    losses: list[float] = notes["losses"]
    for step in range(notes["step"], schedule.steps):
        if history and enough(history[-1]):
            break
        before_step(step)
        for group in optimiser.param_groups:
            group["lr"] = schedule.learning_rate(step)
        optimiser.zero_grad()
        loss = loss_at(step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), schedule.clip)
        optimiser.step()
        losses.append(loss.item())
        done = step + 1
        if done % schedule.evaluate_every == 0 or done == schedule.steps:
            history.append({"step": done, "loss": statistics.fmean(losses), **evaluate(done)})
            losses.clear()
            run.say(", ".join(f"{name} {value:.4g}" for name, value in history[-1].items()))
        run.keep(model, optimiser, {"step": done, "history": history, "losses": losses})
    return history
