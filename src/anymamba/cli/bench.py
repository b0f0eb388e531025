"""`anymamba bench`: speed, memory and share of the ideal, beside what others offer."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    "core",
    "scan",
    "conv",
    "small",
    "blocks",
    "prefill",
    "train",
    "memory",
    "decode",
    "growth",
    "profile",
]
Mode = Literal["forward", "train", "step"]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure speed, memory and share of the ideal; exit code 1 if something computes wrongly."""

    cases: Annotated[Positional[tuple[Group, ...]], arg(metavar="[CASES ...]")] = ()
    """Any of core, scan, conv (operators), small and blocks (blocks of width 256 and 768),
    prefill and train (whole models), memory (of their training), decode (one token after the
    other), growth (lengths and threads), profile. All by default."""

    modes: Annotated[tuple[Mode, ...], arg(metavar="MODE ...")] = ("forward", "train", "step")
    """Any of forward, train (forward and backward), step (one token)."""

    quick: bool = False
    """About a minute: fewer runs and fewer cases."""

    seconds: Annotated[float | None, arg(metavar="X")] = None
    """Time for each way of a case; 1 by default, 0.2 with --quick."""

    threads: Annotated[int | None, arg(metavar="N")] = None
    """Threads that torch and the kernels use."""

    save: Annotated[str | None, arg(metavar="NAME")] = None
    """Write NAME.md, NAME.png and NAME.json; cases that are there already and were not measured
    again stay."""

    json: bool = False
    """Write JSON to stdout instead of text."""

    def run(self, terminal: Terminal) -> int:
        """Measure, print and write."""
        import torch

        from anymamba.bench import GROUPS, Suite, budget_table, rates_line, run_suite
        from anymamba.ops import keep_freed_memory

        self._check()
        keep_freed_memory()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        suite = Suite(
            groups=self.cases or GROUPS, modes=self.modes, quick=self.quick, seconds=self.seconds
        )
        with terminal.err.status("measuring ...") as status:
            report = run_suite(
                suite,
                lambda what: status.update(f"measuring {escape(what)}"),
                _Printer(terminal).show,
                self._keep,
            )
        if report.promises:
            found = budget_table(report.promises)
            terminal.out.print(_dress(found))
            for note in found.notes:
                terminal.out.print(f"  [dim]{escape(note)}[/]")
        terminal.out.print(f"\n  {escape(str(report.machine))}")
        terminal.out.print(f"  {escape(rates_line(report.rates.to_dict()))}\n")
        terminal.out.print(_verdict(report))
        if self.save is not None:
            for file in self._files(self.save):
                terminal.out.print(f"  wrote {escape(str(file))}")
        terminal.document(ok=not report.wrong, **report.to_dict())
        return 1 if report.wrong else 0

    def _keep(self, group: str, report: "Report", is_complete: bool) -> None:
        """Write page, picture and data of this group and of what was there before."""
        if self.save is None:
            return
        from anymamba.bench import add_section, draw, page, section

        written, picture, data = self._files(self.save)
        command = " ".join(["anymamba", "bench", group, *["--quick"] * self.quick])
        sections = add_section(group, section(report, command, is_complete=is_complete), data)
        draw(sections, picture)
        written.write_text(page(sections, plot=picture.name))

    @staticmethod
    def _files(save: str) -> list[Path]:
        """Return page, picture and data beside each other; a name may have dots of its own."""
        name = Path(save)
        return [name.with_name(f"{name.name}.{end}") for end in ("md", "png", "json")]

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

        from anymamba.bench import read_sections

        read_sections(self._files(self.save)[2])
        if find_spec("matplotlib") is None:
            raise ConfigError(
                "bench: --save draws with matplotlib, which is not installed. "
                "Install the extra: pip install 'anymamba[bench]'"
            )


# Rows are printed as they come; these widths keep them in line, in 80 columns.
_WIDTHS = {"mode": 7, "way": 22, "time": 8, "+-": 3, "tokens/s": 8, "peak": 7, "ideal": 5}
_WIDTHS |= {"gain": 6, "model": 16, "by": 9, "weights": 8, "rows": 4, "p99": 6, "reads": 7}
_WIDTHS["training step"] = 27


class _Printer:
    """Prints what was measured, piece by piece, under one headline for each table.

    Args:
        terminal: where to.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._out = terminal.out
        self._title = ""
        self._told: set[str] = set()

    def show(self, piece: "Report") -> None:
        """Print the tables of a piece."""
        from anymamba.bench import tables

        for table in tables(piece):
            # The name of a case stands above its rows.
            has_cases = table.columns[0] == "case"
            if table.title != self._title:
                self._title = table.title
                self._out.print(f"\n[bold]{escape(table.title)}[/]")
                self._line(table, table.columns[has_cases:], has_cases, "dim")
            for row in table.rows:
                if has_cases and row[0]:
                    self._out.print(f"[bold]{escape(row[0])}[/]")
                self._line(table, row[has_cases:], has_cases, _style(row))
            self._notes(table)

    def _line(
        self, table: "PlainTable", cells: Sequence[str], skipped: bool, style: str | None
    ) -> None:
        columns, words = table.columns[skipped:], table.words - skipped
        padded = []
        for place, (column, cell) in enumerate(zip(columns, cells, strict=True)):
            width = _WIDTHS.get(column, 9)
            padded.append(cell.ljust(width) if place < words else cell.rjust(width))
        self._out.print(escape(" ".join(padded)), style=style, soft_wrap=True)

    def _notes(self, table: "PlainTable") -> None:
        for note in table.notes:
            # Whatever case it is about: a reason is told once.
            reason = note.partition(" (")[0]
            if reason not in self._told:
                self._told.add(reason)
                self._out.print(f"  [dim]{escape(note)}[/]")


def _dress(table: "PlainTable") -> Table:
    dressed = new_table(escape(table.title))
    for place, column in enumerate(table.columns):
        is_number = place >= table.words
        dressed.add_column(column, justify="right" if is_number else "left", no_wrap=is_number)
    for row in table.rows:
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
