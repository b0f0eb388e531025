"""Where commands write: people read stdout and stderr, machines read one JSON document."""

import json
import math
import sys
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from anymamba import __version__

__all__ = ["Terminal", "human_bytes", "human_count", "new_table"]


class PipeConsole(Console):
    """A console that leaves a broken pipe to the caller; rich would exit by itself."""

    def on_broken_pipe(self) -> None:
        """Pass it on."""
        raise BrokenPipeError


class Terminal:
    """The two streams of a command.

    Args:
        command: its name, repeated in every document.
        as_json: keep stdout for documents; what people read is dropped.
    """

    def __init__(self, command: str, as_json: bool) -> None:
        """Open both streams."""
        self.command, self.as_json = command, as_json
        # Highlighting would colour numbers inside of text that is not ours.
        self.out = PipeConsole(quiet=as_json, highlight=False)
        self.err = PipeConsole(stderr=True, highlight=False)

    def text(self, text: str) -> None:
        """Write text as it is, at once; nothing in JSON mode."""
        if not self.as_json:
            sys.stdout.write(text)
            sys.stdout.flush()

    def document(self, *, ok: bool, **facts: Any) -> None:
        """Write one line of JSON; nothing unless in JSON mode."""
        if self.as_json:
            entries = {"command": self.command, "version": __version__, "ok": ok, **facts}
            sys.stdout.write(json.dumps(_plain(entries), allow_nan=False) + "\n")
            sys.stdout.flush()


def _plain(value: Any) -> Any:
    """Replace what JSON has no word for: NaN and infinities become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def new_table(title: str) -> Table:
    """Return an empty table in the house's dress."""
    return Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )


def human_count(number: float, unit: str = "") -> str:
    """Shorten a number to three digits.

    Example:
        >>> human_count(129135360), human_count(384, "B")
        ('129 M', '384 B')
    """
    size, prefix = float(number), ""
    for prefix in ("", "k", "M", "G", "T"):
        if size < 999.5 or prefix == "T":
            break
        size /= 1000
    digits = f"{size:.3g}" if prefix else f"{size:.0f}"
    return f"{digits} {prefix}{unit}".rstrip()


def human_bytes(number: float) -> str:
    """Shorten a number of bytes to three digits."""
    return human_count(number, "B")
