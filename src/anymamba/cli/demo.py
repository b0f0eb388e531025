"""`anymamba demo`: a short tour through the engine room, in the terminal."""

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import anymamba
from anymamba.bench import Figure, core_figures, core_inputs, scan_figures
from anymamba.cli.laws import LAWS, errors_of
from anymamba.cli.scans import all_scans

__all__ = ["run_demo"]

# float32 rounds to 6e-8; sums over a hundred tokens and two passes add up to a few 1e-5.
LIMIT = 2e-4


def run_demo(console: Console, *, length: int = 97, size: int = 1024, repeats: int = 3) -> int:
    """Show that all ways of computing a scan agree, and what each costs.

    Args:
        console: where to print.
        length: tokens in the equality table.
        size: tokens in the cost table.
        repeats: runs per median.

    Returns:
        The exit code: 0 if every law held.
    """
    threads = torch.get_num_threads()
    console.print(
        f"\n[bold]anymamba[/] {anymamba.__version__}   torch {torch.__version__}, "
        f"{threads} thread{'s' if threads > 1 else ''}, no GPU and no compiler needed\n"
    )
    with console.status("running every scan every way ..."):
        rows = {scan.name: errors_of(scan) for scan in all_scans(length)}
    console.print(_law_table(rows, length))
    worst = max(error for row in rows.values() for error in row.values() if error is not None)
    holds = worst <= LIMIT
    console.print(
        f"  {'[green]All equal[/]' if holds else '[bold red]NOT EQUAL[/]'}: "
        f"no error above {worst:.1e} of the largest value (float32).\n"
    )
    with console.status("timing forward and backward ..."):
        core = core_figures(core_inputs(s=size), repeats)
        scan = scan_figures(size // 2, repeats=repeats)
    title = f"SSD core, forward + backward, {size} tokens, 24 heads of 64 x 128"
    console.print(_cost_table(title, core))
    title = f"Selective scan, forward + backward, {size // 2} tokens, 1536 channels"
    console.print(_cost_table(title, scan))
    console.print("  Intermediates: peak memory beyond inputs, outputs and their gradients.\n")
    return 0 if holds else 1


def _law_table(rows: dict[str, dict[str, float | None]], length: int) -> Table:
    table = _table(f"One scan, many ways: error against the loop over time, {length} tokens")
    table.add_column("scan")
    for law in LAWS:
        table.add_column(law, justify="right")
    for name, errors in rows.items():
        table.add_row(name, *(_error(error) for error in errors.values()))
    return table


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )


def _error(error: float | None) -> str:
    if error is None:
        return "[dim]-[/]"
    return f"{error:.0e}" if error <= LIMIT else f"[bold red]{error:.0e}[/]"


def _cost_table(title: str, figures: list[Figure]) -> Table:
    table = _table(title)
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
