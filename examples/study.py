"""What the studies share: stored cells, training that resumes, fixed seeds, flags, progress.

    study = Study("state_tracking", options)
    result = study.cell("parity | Mamba-3 | seed 0", setting, compute)

A study is a table of cells. `compute` runs once; what it returns is kept in `<results>/<name>.json`
and read from there the next time. A cell that was interrupted goes on from its last checkpoint. The
batches of a training run are a function of seed and step (`seeded`), so an interrupted run ends
with the same weights as one in a single go.
"""

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock
from torch import Tensor, nn

import anymamba as am

# A turn of Mamba-3 is a step size times an angle: with the default, 0.001 to 0.1, a model begins
# with turns of nearly nothing.
LARGE_STEPS = {"dt_min": 0.1, "dt_max": 1.0}
RESULTS = Path(__file__).resolve().parent / "results"
TIMES = ("seconds", "cpu_seconds")
SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_CHECKPOINTS = 30.0


class StudyError(ValueError):
    """A stored result does not belong to the setting that is asked for."""


class Spread(NamedTuple):
    """Mean over seeds and the distances from it to the lowest and the highest."""

    mean: float
    below: float
    above: float


def spread(values: Sequence[float]) -> Spread:
    """Return the mean with the range as its error bar: with few seeds, no model of the noise."""
    mean = statistics.fmean(values)
    return Spread(mean, mean - min(values), max(values) - mean)


def ranged(values: Sequence[float], digits: int = 1, *, count: bool = False) -> str:
    """Return mean and range as text, and how many values there are; `-` where there are none.

    Example:
        >>> ranged([1.0, 2.0], count=True)
        '1.5 (1.0 to 2.0, n=2)'
        >>> ranged([-0.04])
        '0.0 (0.0 to 0.0)'
    """
    if not values:
        return "-"
    # Zero is added, because a rounded -0.0 would keep its sign.
    mean, low, high = (
        f"{round(x, digits) + 0.0:.{digits}f}"
        for x in (statistics.fmean(values), min(values), max(values))
    )
    return f"{mean} ({low} to {high}" + (f", n={len(values)})" if count else ")")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown.

    Example:
        >>> print(table(["a", "b"], [["1", "2"]]))
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    first, *others = ("| " + " | ".join(row) + " |" for row in (heads, *rows))
    return "\n".join([first, "|---" * len(heads) + "|", *others])


def seeded(*numbers: int) -> torch.Generator:
    """Return a random generator that depends on all of the numbers, such as seed and step."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 0x9E3779B97F4A7C15 + number + 1) % 2**63
    return torch.Generator().manual_seed(mixed)


def positive(text: str) -> int:
    """Read a whole number of at least 1 from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
    return number


def share(text: str) -> float:
    """Read a number above 0 from the command line."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0; got {text}")
    return number


def flags(description: str) -> argparse.ArgumentParser:
    """Return a parser with the flags that every study has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a minute's version of the study")
    parser.add_argument(
        "--budget", type=share, default=1.0, help="share of the training steps to spend (1)"
    )
    parser.add_argument(
        "--only", default="", help="compute only cells whose key contains this; show all"
    )
    parser.add_argument("--plot-only", action="store_true", help="compute nothing, show what is")
    parser.add_argument(
        "--results", type=Path, default=None, help="folder of results (examples/results)"
    )
    return parser


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


class Study:
    """A table of cells with a file.

    Args:
        name: of the result file.
        options: what `flags(...)` parsed.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        """Read the cells that are finished."""
        self.name, self.options = name, options
        # A short run must never be taken for the real one.
        part = "" if options.budget == 1 else f"budget-{options.budget:g}"
        self.folder = (options.results or RESULTS) / ("quick" if options.quick else part)
        self.file = self.folder / f"{name}.json"
        self.scratch = self.folder / "unfinished"

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        """The finished cells: setting, result and seconds of each, by key."""
        return json.loads(self.file.read_text())["cells"] if self.file.exists() else {}

    def time_spent(self) -> str:
        """Say how many cells are finished and what they cost."""
        hours = [sum(c[kind] for c in self.cells.values()) / 3600 for kind in TIMES]
        return f"{len(self.cells)} cells, {hours[1]:.2f} h of processor time in {hours[0]:.2f} h"

    def picture(self) -> Path:
        """Return where the study's plot goes."""
        return self.file.with_suffix(".png")

    def cell(
        self,
        key: str,
        setting: dict[str, Any],
        compute: Callable[[Run], dict[str, Any]],
        *,
        threads: int | None = 1,
    ) -> dict[str, Any] | None:
        """Return the result under a key: from the file, or computed now and stored.

        Args:
            key: readable name of the cell, such as "parity | Mamba-2 | seed 1".
            setting: all that decides the result; stored beside it.
            compute: returns the result, plain values ready for JSON.
            threads: for computing; None leaves torch's number. The models are small: two commands
                side by side fill two cores, and one thread gives the same digits everywhere.

        Returns:
            The result, or None where `--only` or `--plot-only` leave a cell out.

        Raises:
            StudyError: the stored cell was made with another setting.
        """
        setting = json.loads(json.dumps(setting))
        stored = self.cells.get(key)
        if stored is not None:
            if stored["setting"] != setting:
                raise StudyError(
                    f"{self.file}: the cell {key!r} was made with {stored['setting']}, and now "
                    f"{setting} is asked for. Give the flags of that run, remove the cell, or "
                    "choose another folder with --results."
                )
            return stored["result"]
        if self.options.plot_only or self.options.only not in key:
            return None
        name = "".join(c if c.isalnum() else "-" for c in key)
        run = Run(key, setting, self.scratch / self.name / f"{name}.pt")
        print(f"{key}: starts", flush=True)
        with on_threads(threads):
            result = compute(run)
        spent = {"seconds": round(run.seconds, 1), "cpu_seconds": round(run.cpu_seconds, 1)}
        self._store(key, {"setting": setting, "result": result, **spent})
        run.clear()
        print(f"{key}: {result} in {run.seconds:.0f} s", flush=True)
        return result

    def _store(self, key: str, cell: dict[str, Any]) -> None:
        """Add a cell to the newest state of the file, in one move."""
        self.folder.mkdir(parents=True, exist_ok=True)
        made_with = {
            "anymamba": am.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        # Two commands may fill one table: nobody writes between this reading and this writing.
        with FileLock(self.file.with_suffix(".lock")):
            cells = {**self.cells, key: {**cell, "made_with": made_with}}
            beside = self.file.with_suffix(".part")
            beside.write_text(json.dumps({"study": self.name, "cells": cells}, indent=1) + "\n")
            os.replace(beside, self.file)


@contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """Give torch this many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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

    Returns:
        The measures in order, each with its `step` and the mean `loss` since the one before.
    """
    notes = run.restore(model, optimiser) or {"step": 0, "history": [], "losses": []}
    history: list[dict[str, float]] = notes["history"]
    losses: list[float] = notes["losses"]
    for step in range(notes["step"], schedule.steps):
        if history and enough(history[-1]):
            break
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
