"""`metrics.jsonl`: what happened in a run, one JSON object per line, in the order it happened.

Each entry has `kind` ("step", "valid", "sample", "skip", ...) and `step`. A resumed run cuts the
lines after its checkpoint and writes them again, so an interrupted run leaves the same losses as a
straight one.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from anymamba.errors import CheckpointError
from anymamba.io import replacing

__all__ = ["MetricsFile", "read_metrics"]


class MetricsFile:
    """An append-only file of metrics; every entry is on the disk's side before the next begins.

    Args:
        file: where to write; its folder must exist.
        keep_until: keep the older entries up to this step and cut the rest, a half line included;
            None starts an empty file.

    Raises:
        CheckpointError: the file cannot be written.
    """

    def __init__(self, file: Path, keep_until: int | None) -> None:
        """Open the file."""
        self.file = file
        kept = [] if keep_until is None else _until(read_metrics(file), keep_until)
        with replacing("MetricsFile", file) as stream:
            stream.write("".join(_line(entry) for entry in kept).encode())
        # Open until `close`.
        self._stream = open(file, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one entry.

        Raises:
            CheckpointError: the disk is full.
        """
        try:
            self._stream.write(_line(entry))
            self._stream.flush()
        except OSError as error:
            raise CheckpointError(
                f"MetricsFile: {str(self.file)!r} must be writable and have room; {error}. "
                "Make room, then resume."
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the entries of a metrics file, oldest first; a half last line does not count.

    Raises:
        CheckpointError: a line before the last one is damaged.
    """
    if not file.exists():
        return []
    entries: list[dict[str, Any]] = []
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        # Without its line feed a line may be half a number that still reads as a whole one.
        if number == len(lines):
            break
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise CheckpointError(
                f"read_metrics: {str(file)!r} must hold one JSON object per line; line {number} "
                f"does not ({error}). Remove that line."
            ) from error
        entries.append(entry)
    return entries


def _until(entries: Iterable[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["step"] <= step and entry["kind"] != "end"]


def _line(entry: Mapping[str, Any]) -> str:
    plain = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in entry.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"
