"""A short tour through the engine room: all ways of computing a scan agree, and what each costs."""

from typing import NamedTuple

from rich.table import Table

from anymamba.bench import Figure, core_figures, core_inputs, scan_figures
from anymamba.cli.laws import LAWS, errors_of
from anymamba.cli.scans import all_scans
from anymamba.cli.terminal import Terminal, new_table

__all__ = ["Tour", "show_tour"]

# float32 rounds to 6e-8; sums over a hundred tokens and two passes add up to a few 1e-5.
LIMIT = 2e-4


class Tour(NamedTuple):
    """What the tour found: whether every law held, and the numbers of its tables."""

    ok: bool
    errors: dict[str, dict[str, float | None]]
    core: list[Figure]
    scan: list[Figure]


def show_tour(terminal: Terminal, *, length: int, size: int, repeats: int) -> Tour:
    """Print the equality table and the cost tables.

    Args:
        terminal: where to print.
        length: tokens in the equality table.
        size: tokens in the cost tables.
        repeats: runs per median.
    """
    out = terminal.out
    with terminal.err.status("running every scan every way ..."):
        errors = {scan.name: errors_of(scan) for scan in all_scans(length)}
    out.print(_law_table(errors, length))
    found = [error for row in errors.values() for error in row.values() if error is not None]
    # Not by the maximum alone, which NaN can slip past.
    worst, ok = max(found), all(error <= LIMIT for error in found)
    out.print(
        f"  {'[green]All equal[/]' if ok else '[bold red]NOT EQUAL[/]'}: "
        f"no error above {worst:.1e} of the largest value (float32).\n"
    )
    with terminal.err.status("timing forward and backward ..."):
        core = core_figures(core_inputs(s=size), repeats)
        scan = scan_figures(size // 2, repeats=repeats)
    out.print(_cost_table(f"SSD core, forward + backward, {size} tokens, 24 heads", core))
    out.print(_cost_table(f"Selective scan, forward + backward, {size // 2} tokens", scan))
    out.print("  Intermediates: peak memory beyond inputs, outputs and their gradients.\n")
    return Tour(ok, errors, core, scan)


def _law_table(rows: dict[str, dict[str, float | None]], length: int) -> Table:
    table = new_table(f"One scan, many ways: error against the loop over time, {length} tokens")
    table.add_column("scan")
    for law in LAWS:
        table.add_column(law, justify="right")
    for name, errors in rows.items():
        table.add_row(name, *(_error(error) for error in errors.values()))
    return table


def _error(error: float | None) -> str:
    if error is None:
        return "[dim]-[/]"
    return f"{error:.0e}" if error <= LIMIT else f"[bold red]{error:.0e}[/]"


def _cost_table(title: str, figures: list[Figure]) -> Table:
    table = new_table(title)
    table.add_column("way", min_width=20)
    table.add_column("time", justify="right")
    table.add_column("intermediates", justify="right")
    table.add_column("of the inputs", justify="right")
    for figure in figures:
        table.add_row(
            figure.name,
            f"{1e3 * figure.seconds:.0f} ms",
            f"{figure.intermediates / 1e6:.0f} MB",
            f"{figure.intermediates / figure.inputs:.2f}x",
        )
    return table
