"""Checkpoints of a run: numbered folders that appear whole or not at all.

    checkpoints/step-00000120/model.safetensors      one file per group of tensors
                              optimizer.safetensors
                              ...
                              facts.json             step, data position, recipe, counters
                              manifest.json          SHA-256 of every other file

A checkpoint is written into a hidden folder, flushed to the disk, and then renamed: a process
killed at any moment leaves either the whole checkpoint or a hidden folder that the next run sweeps
away. Older checkpoints are removed only after the newer one has its name.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from anymamba.errors import CheckpointError, ConfigError
from anymamba.io import read_json, read_safetensors, write_json, write_safetensors

__all__ = ["CheckpointFolder", "Snapshot"]

WHERE = "CheckpointFolder"
FACTS = "facts.json"
MANIFEST = "manifest.json"
FORMAT = "anymamba-training"
VERSION = 1
_NAME = re.compile(r"step-(\d{8,})")
_DAMAGED = "damaged"

log = logging.getLogger("anymamba.train")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything a run needs to go on from a step.

    Args:
        step: optimiser steps that were taken.
        tensors: groups of named tensors, each stored in a file of its own.
        facts: plain values that JSON can hold; floats return to the last bit.
    """

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    facts: Mapping[str, Any]


class CheckpointFolder:
    """The numbered checkpoints of one run.

    Args:
        folder: where they lie; created when the first one is saved.
        keep: how many of the newest stay; at least 1.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = CheckpointFolder(Path(folder), keep=2)
        ...     for step in (10, 20, 30):
        ...         snapshot = Snapshot(
        ...             step=step, tensors={"model": {"w": torch.ones(2)}}, facts={"loss": 0.1}
        ...         )
        ...         _ = saved.save(snapshot)
        ...     saved.steps(), saved.newest().facts
        ([20, 30], {'loss': 0.1})
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        """Look at the folder; nothing is written yet."""
        if keep < 1:
            raise ConfigError(f"{WHERE}: keep must be at least 1; got {keep}.")
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, whole or damaged, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [_NAME.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir()]
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"step-{step:08}"

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint and remove the oldest beyond `keep`; returns its folder.

        A whole checkpoint of the same step is left as it is: the same run would write it again.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written; what was there
                before is untouched.
        """
        hidden = self.begin(snapshot.step)
        return self.path(snapshot.step) if hidden is None else self.finish(hidden, snapshot)

    def begin(self, step: int) -> Path | None:
        """Return a hidden folder to write a checkpoint into; None if there is a whole one already.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        target = self.path(step)
        if target.exists():
            if self.damage(step) is None:
                return None
            self._set_aside(step)
        hidden = self.folder / f".{target.name}.{secrets.token_hex(4)}.part"
        try:
            hidden.mkdir(parents=True)
        except OSError as error:
            raise self._unwritable(error) from error
        return hidden

    def finish(self, hidden: Path, snapshot: Snapshot) -> Path:
        """Write the rest of a checkpoint, give it its name and remove the oldest beyond `keep`.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written.
        """
        target = self.path(snapshot.step)
        try:
            _fill(hidden, snapshot)
            os.rename(hidden, target)
            flush_folder(self.folder)
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
        self._prune()
        return target

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{WHERE}: {str(self.folder)!r} must be writable and have room; {error}. "
            "Older checkpoints are untouched: make room, then resume."
        )

    def newest(self) -> Snapshot | None:
        """Return the newest whole checkpoint, or None when there is none; see `newest_step`."""
        step = self.newest_step()
        return None if step is None else self.load(step)

    def newest_step(self) -> int | None:
        """Return the step of the newest whole checkpoint, or None when there is none at all.

        Damaged ones after it are set aside under other names, with a warning in the log. Where
        none is whole nothing is renamed, so that asking again gives the same answer.

        Raises:
            CheckpointError: there are checkpoints, and all of them are damaged.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            why = self.damage(step)
            if why is None:
                self._leave_behind(damaged)
                return step
            damaged[step] = why
        if many := len(damaged) + len(self._set_aside_before()):
            raise CheckpointError(
                f"{WHERE}: one checkpoint in {str(self.folder)!r} must be whole; all {many} are "
                "damaged. Restore one from a copy, or train anew with another loop.out."
            )
        return None

    def load(self, step: int) -> Snapshot:
        """Read one checkpoint.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        if (why := self.damage(step)) is not None:
            raise CheckpointError(
                f"{WHERE}: {str(self.path(step))!r} must be a whole checkpoint; {why}. "
                "Use an older one."
            )
        folder = self.path(step)
        entries = read_json(WHERE, folder / FACTS)
        tensors = {
            name: read_safetensors(WHERE, folder / f"{name}.safetensors")[0]
            for name in entries["groups"]
        }
        return Snapshot(step=entries["step"], tensors=tensors, facts=entries["facts"])

    def damage(self, step: int) -> str | None:
        """Say what is wrong with a checkpoint, or return None when every byte is as written."""
        folder = self.path(step)
        try:
            manifest = read_json(WHERE, folder / MANIFEST)
            if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
                return f"{MANIFEST} is not of {FORMAT} version {VERSION}"
            for name, expected in manifest["sha256"].items():
                if _digest(folder / name) != expected:
                    return f"{name} has another checksum than when it was written"
        except CheckpointError:
            return f"{MANIFEST} is missing or unreadable"
        except (OSError, KeyError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def sweep(self) -> None:
        """Remove what a killed process left half written; call it while no other process saves."""
        if self.folder.is_dir():
            for path in self.folder.glob(".step-*.part"):
                shutil.rmtree(path)

    def _leave_behind(self, damaged: Mapping[int, str]) -> None:
        for step, why in damaged.items():
            aside = self._set_aside(step)
            log.warning(
                "the checkpoint of step %d is damaged (%s); it is now called %s, and the one "
                "before it is used",
                *(step, why, aside.name),
            )

    def _set_aside_before(self) -> list[Path]:
        return list(self.folder.glob(f"{_DAMAGED}-step-*"))

    def _set_aside(self, step: int) -> Path:
        aside = self.folder / f"{_DAMAGED}-{self.path(step).name}-{secrets.token_hex(4)}"
        os.rename(self.path(step), aside)
        return aside

    def _prune(self) -> None:
        for step in self.steps()[: -self.keep]:
            # Out of sight first: a kill in the middle must not leave half a checkpoint by name.
            hidden = self.folder / f".{self.path(step).name}.{secrets.token_hex(4)}.part"
            os.rename(self.path(step), hidden)
            shutil.rmtree(hidden)


def _fill(folder: Path, snapshot: Snapshot) -> None:
    """Write all files of a checkpoint and flush them to the disk, the manifest last."""
    names = [f"{group}.safetensors" for group in snapshot.tensors]
    for name, tensors in zip(names, snapshot.tensors.values(), strict=True):
        write_safetensors(WHERE, folder / name, tensors, {})
    facts = {
        "step": snapshot.step,
        "groups": list(snapshot.tensors),
        "facts": dict(snapshot.facts),
    }
    # Written here and not while renaming: what JSON cannot hold must fail before the rename.
    write_json(WHERE, folder / FACTS, json.loads(json.dumps(facts)))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {path.relative_to(folder).as_posix(): _digest(path) for path in files}
    write_json(WHERE, folder / MANIFEST, {"format": FORMAT, "version": VERSION, "sha256": digests})
    flush_folder(folder)


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, where the system can do that."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
