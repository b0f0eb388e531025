"""A study: a table of cells in a file, filled by as many processes as there are cores.

    study = Study("state_tracking", options)
    results = study.complete(collect)

    def collect(study):
        return study.cell("parity | Mamba-3 | seed 0", setting, compute)

`compute` runs once; what it returns is kept in `<results>/<name>.json` and read from there the next
time. A cell that was interrupted goes on from its last checkpoint (`training.py`).
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock, Timeout

import anymamba as am
from training import Run, StudyError

RESULTS = Path(__file__).resolve().parent / "results"
TIMES = ("seconds", "cpu_seconds")
SECONDS_BETWEEN_LOOKS = 2.0

Found = TypeVar("Found")
Compute = Callable[[Run], dict[str, Any]]


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
        "--jobs",
        type=positive,
        default=torch.get_num_threads(),
        help="cells that are computed at once, on a core each (%(default)s here)",
    )
    parser.add_argument(
        "--results", type=Path, default=None, help="folder of results (examples/results)"
    )
    return parser


class Study:
    """A table of cells with a file.

    Args:
        name: of the result file.
        options: what `flags(...)` parsed.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        """Say where results go; nothing is read before a cell is asked for."""
        self.name, self.options = name, options
        # A short run must never be taken for the real one.
        part = "" if options.budget == 1 else f"budget-{options.budget:g}"
        self.folder = (options.results or RESULTS) / ("quick" if options.quick else part)
        self.file = self.folder / f"{name}.json"
        self.scratch = self.folder / "unfinished"
        self.has_machine = True  # no other cells are computed by this command
        self.met_others = False  # a cell was left to another process since this was last cleared

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

    def complete(self, collect: Callable[["Study"], Found]) -> Found:
        """Compute all cells that `collect` asks for, in `--jobs` processes; return what it does.

        Args:
            collect: asks for every cell of the table and returns what the study makes of them;
                where a cell is not there yet it gets None and goes on. A function of a module,
                because other processes have to find it.

        Raises:
            StudyError: a helping process failed; its own message is above.
        """
        count = 0 if self.options.plot_only else self.options.jobs - 1
        process = multiprocessing.get_context("spawn").Process
        helpers = [process(target=_help, args=(self, collect), daemon=True) for _ in range(count)]
        self.has_machine = not helpers
        for helper in helpers:
            helper.start()
        found = self.fill(collect)
        for helper in helpers:
            helper.join()
        if any(helper.exitcode for helper in helpers):
            raise StudyError(
                f"{self.name}: a helping process failed, with the message above. What is finished "
                "is kept: mend the cause, or give --jobs 1, and run the same command again."
            )
        if self.has_machine:
            return found
        self.has_machine = True
        return self.fill(collect)

    def fill(self, collect: Callable[["Study"], Found]) -> Found:
        """Collect again and again, until no other process has a cell of ours in hands."""
        while True:
            self.met_others = False
            found = collect(self)
            if not self.met_others:
                return found
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def cell(
        self, key: str, setting: dict[str, Any], compute: Compute, *, threads: int | None = 1
    ) -> dict[str, Any] | None:
        """Return the result under a key: from the file, or computed now and stored.

        Args:
            key: readable name of the cell, such as "parity | Mamba-2 | seed 1".
            setting: all that decides the result; stored beside it.
            compute: returns the result, plain values ready for JSON.
            threads: for computing. The models are small: several cells at a time fill the cores,
                and one thread gives the same digits everywhere. None leaves torch's number to a
                cell that measures speed, and computes it when all others are there.

        Returns:
            The result, or None where `--only` or `--plot-only` leave a cell out, another process
            computes it, or others are computed beside it and it wants to be alone.

        Raises:
            StudyError: the stored cell was made with another setting.
        """
        setting = json.loads(json.dumps(setting))
        found = self._stored(key, setting)
        wants_machine = threads is None
        if found is not None or self.options.plot_only or self.options.only not in key:
            return found
        if wants_machine and not self.has_machine:
            return None
        name = "".join(c if c.isalnum() else "-" for c in key)
        checkpoint = self.scratch / self.name / f"{name}.pt"
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        claim = FileLock(checkpoint.with_suffix(".claim"))
        try:
            claimed = claim.acquire(timeout=0)
        except Timeout:
            self.met_others = True
            return None
        with claimed:
            # It may have been finished between the look into the file and the claim.
            found = self._stored(key, setting)
            if found is None:
                found = self._compute(Run(key, setting, checkpoint), compute, threads)
        Path(claim.lock_file).unlink(missing_ok=True)
        return found

    def _compute(self, run: Run, compute: Compute, threads: int | None) -> dict[str, Any]:
        print(f"{run.key}: starts", flush=True)
        with on_threads(threads):
            result = compute(run)
        spent = {"seconds": round(run.seconds, 1), "cpu_seconds": round(run.cpu_seconds, 1)}
        self._store(run.key, {"setting": run.setting, "result": result, **spent})
        run.clear()
        print(f"{run.key}: {result} in {run.seconds:.0f} s", flush=True)
        return result

    def _stored(self, key: str, setting: dict[str, Any]) -> dict[str, Any] | None:
        stored = self.cells.get(key)
        if stored is None:
            return None
        if stored["setting"] != setting:
            raise StudyError(
                f"{self.file}: the cell {key!r} was made with {stored['setting']}, and now "
                f"{setting} is asked for. Give the flags of that run, remove the cell, or "
                "choose another folder with --results."
            )
        return stored["result"]

    def _store(self, key: str, cell: dict[str, Any]) -> None:
        """Add a cell to the newest state of the file, in one move."""
        made_with = {
            "anymamba": am.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        # Several processes fill one table: nobody writes between this reading and this writing.
        with FileLock(self.file.with_suffix(".lock")):
            cells = {**self.cells, key: {**cell, "made_with": made_with}}
            beside = self.file.with_suffix(".part")
            beside.write_text(json.dumps({"study": self.name, "cells": cells}, indent=1) + "\n")
            os.replace(beside, self.file)


def _help(study: Study, collect: Callable[[Study], Any]) -> None:
    """Compute cells in a process of its own, until none is left or the parent is gone."""
    # Ctrl-C is the parent's: it ends, and this process with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    study.fill(collect)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


@contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """Give torch this many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
