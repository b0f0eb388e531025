"""`anymamba bench`: speed, memory and share of the ideal, beside what others offer."""

import json as json_format
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.markup import escape
from rich.table import Table
from tyro.conf import Positional, arg

from anymamba.cli.terminal import Terminal, new_table
from anymamba.errors import ConfigError

if TYPE_CHECKING:
    from anymamba.bench import PlainTable, Report

__all__ = ["Bench"]

Group = Literal[
    "core", "scan", "conv", "small", "blocks", "prefill", "train", "decode", "growth", "profile"
]
Mode = Literal["forward", "train", "step"]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure speed, memory and share of the ideal; exit code 1 if something computes wrongly."""

    cases: Annotated[Positional[tuple[Group, ...]], arg(metavar="[CASES ...]")] = ()
    """Any of core, scan, conv (operators), small and blocks (blocks of width 256 and 768),
    prefill and train (whole models), decode (one token after the other), growth (lengths and
    threads), profile. All by default."""

    modes: Annotated[tuple[Mode, ...], arg(metavar="MODE ...")] = ("forward", "train", "step")
    """Any of forward, train (forward and backward), step (one token)."""

    quick: bool = False
    """About a minute: fewer runs and fewer cases."""

    seconds: Annotated[float | None, arg(metavar="X")] = None
    """Time for each way of a case; 1 by default, 0.2 with --quick."""

    threads: Annotated[int | None, arg(metavar="N")] = None
    """Threads that torch and the kernels use."""

    save: Annotated[str | None, arg(metavar="NAME")] = None
    """Write NAME.md, NAME.png and NAME.json."""

    json: bool = False
    """Write JSON to stdout instead of text."""

    def run(self, terminal: Terminal) -> int:
        """Measure, print and write."""
        import torch

        from anymamba.bench import GROUPS, Suite, rates_line, run_suite, tables

        self._check()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        suite = Suite(
            groups=self.cases or GROUPS, modes=self.modes, quick=self.quick, seconds=self.seconds
        )
        with terminal.err.status("measuring ...") as status:
            report = run_suite(suite, lambda what: status.update(f"measuring {escape(what)}"))
        terminal.out.print(f"\n  {escape(str(report.machine))}")
        terminal.out.print(f"  {escape(rates_line(report.rates))}\n")
        for table in tables(report):
            for dressed in _dressed(table):
                terminal.out.print(dressed)
            for note in table.notes:
                terminal.out.print(f"  [dim]{escape(note)}[/]")
        terminal.out.print(_verdict(report))
        if self.save is not None:
            for file in self._write(report, Path(self.save)):
                terminal.out.print(f"  wrote {escape(str(file))}")
        terminal.document(ok=not report.wrong, **report.to_dict())
        return 1 if report.wrong else 0

    def _write(self, report: "Report", name: Path) -> list[Path]:
        """Write page, picture and data beside each other; a name may have dots of its own."""
        from anymamba.bench import draw, markdown

        page, picture, data = (
            name.with_name(f"{name.name}.{end}") for end in ("md", "png", "json")
        )
        draw(report, picture)
        words = ["anymamba", "bench", *self.cases, *["--quick"] * self.quick]
        page.write_text(markdown(report, plot=picture.name, command=" ".join(words)))
        data.write_text(json_format.dumps(report.to_dict(), indent=1) + "\n")
        return [page, picture, data]

    def _check(self) -> None:
        """Refuse what would fail after minutes of measuring."""
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"bench: --threads must be at least 1; got {self.threads}.")
        if self.seconds is not None and self.seconds <= 0:
            raise ConfigError(f"bench: --seconds must be positive; got {self.seconds}.")
        if self.save is None:
            return
        folder = Path(self.save).resolve().parent
        if not folder.is_dir():
            raise ConfigError(
                f"bench: the folder of --save must exist; there is no {folder}. Create it first."
            )
        from importlib.util import find_spec

        if find_spec("matplotlib") is None:
            raise ConfigError(
                "bench: --save draws with matplotlib, which is not installed. "
                "Install the extra: pip install 'anymamba[bench]'"
            )


def _dressed(table: "PlainTable") -> Iterator[Table]:
    """Dress a table; one with cases becomes a table for each of them, with columns in line."""
    if table.columns[0] != "case":
        yield _dress(table, table.title, table.rows)
        return
    starts = [place for place, row in enumerate(table.rows) if row[0]]
    inner = table._replace(columns=table.columns[1:], words=table.words - 1)
    widths = [
        max(len(row[place + 1]) for row in [table.columns, *table.rows])
        for place in range(len(inner.columns))
    ]
    for start, stop in pairwise([*starts, len(table.rows)]):
        rows = [row[1:] for row in table.rows[start:stop]]
        yield _dress(inner, table.rows[start][0], rows, widths)


def _dress(
    table: "PlainTable", title: str, rows: Sequence[tuple[str, ...]], widths: Sequence[int] = ()
) -> Table:
    dressed = new_table(escape(title))
    for place, column in enumerate(table.columns):
        is_number = place >= table.words
        dressed.add_column(
            column,
            justify="right" if is_number else "left",
            no_wrap=is_number or bool(widths),
            min_width=widths[place] if widths else None,
        )
    for row in rows:
        dressed.add_row(*(_cell(cell) for cell in row), style=_style(row))
    return dressed


def _cell(cell: str) -> str:
    return "[dim]-[/]" if cell == "-" else escape(cell)


def _style(row: tuple[str, ...]) -> str | None:
    if "WRONG" in row:
        return "bold red"
    if "not met" in row:
        return "yellow"
    return "green" if "met" in row else None


def _verdict(report: "Report") -> str:
    if report.wrong:
        return f"  [bold red]WRONG[/], so no speed is printed: {escape(', '.join(report.wrong))}"
    return "  [green]Every way that was timed agrees with the reference.[/]"
