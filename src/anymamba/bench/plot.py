"""The picture of a page: speed over the portable path, share of the ideal, time by length."""

import os
from collections.abc import Sequence
from typing import Any

from anymamba.bench.archive import Sections
from anymamba.bench.machine import Machine

__all__ = ["draw"]

# One colour and one marker per column, so that the picture can be read without colours.
STYLES = {
    "native": ("#d62728", "o"),
    "portable": ("#1f77b4", "s"),
    "serial": ("#2ca02c", "^"),
    "unbind": ("#8c564b", "v"),
    "torch": ("#7f7f7f", "D"),
    "transformers": ("#ff7f0e", "P"),
    "llama.cpp": ("#9467bd", "X"),
}


def draw(sections: Sections, file: str | os.PathLike[str]) -> None:
    """Draw what was measured into a PNG.

    Args:
        sections: by group.
        file: to write.

    Raises:
        ImportError: matplotlib is not installed; it comes with the extra `bench`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for one in sections.values() for row in one["rows"] if row["seconds"]]
    growth = [figure for one in sections.values() for figure in one["growth"]]
    labels = list(dict.fromkeys(_label(row) for row in rows))
    tall = max(3.0, 0.24 * len(labels) + 1.2)
    lower = 3.2 if growth else 0.0
    figure = Figure(figsize=(12, tall + lower + 1.0), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    if lower:
        grid = figure.add_gridspec(2, 2, height_ratios=[tall, lower])
        _growth(figure.add_subplot(grid[1, :]), growth)
    else:
        grid = figure.add_gridspec(1, 2)
    speed = figure.add_subplot(grid[0, 0])
    ideal = figure.add_subplot(grid[0, 1], sharey=speed)
    _dots(speed, rows, labels, "over_portable")
    _dots(ideal, rows, labels, "share_of_ideal")
    speed.set_title("Speed over the portable path")
    ideal.set_title("Share of the machine's ideal")
    speed.set_yticks(range(len(labels)), labels, fontsize=7)
    speed.set_ylim(len(labels) - 0.5, -0.5)
    ideal.tick_params(labelleft=False)
    figure.legend(*_legend(speed, ideal), loc="outside lower center", ncols=6, fontsize=8)
    figure.suptitle("\n".join(_machines(sections)), fontsize=8)
    figure.savefig(file)


def _legend(*axes: Any) -> tuple[list[Any], list[str]]:
    """Return one entry per column, wherever it was drawn."""
    found = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    return list(found.values()), list(found)


def _label(row: dict[str, Any]) -> str:
    dtype = "" if row["dtype"] == "float32" else f" {row['dtype']}"
    return f"{row['case']}{dtype}, {row['mode']}"


def _machines(sections: Sections) -> list[str]:
    """Return a line for each machine and day."""
    machines = [Machine(**one["machine"]) for one in sections.values()]
    lines = [
        f"{m.cpu}, {m.cores} cores, {m.threads} threads, {m.instructions}, CPU kernels: "
        f"{m.kernels.partition(' (')[0]}, torch {m.torch}, anymamba {m.anymamba}, {m.date}"
        for m in machines
    ]
    return list(dict.fromkeys(lines))


def _dots(axis: Any, rows: Sequence[dict[str, Any]], labels: list[str], what: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    place = {label: height for height, label in enumerate(labels)}
    for way, (colour, marker) in STYLES.items():
        found = [
            (row[what], place[_label(row)])
            for row in rows
            if row["way"] == way and row[what] is not None
        ]
        if found:
            axis.scatter(*zip(*found, strict=True), c=colour, marker=marker, s=26, label=way)
    axis.set_xscale("log")
    as_ratio = what == "over_portable"
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(
        lambda value, _: f"{value:g}x" if as_ratio else f"{100 * value:g}%"
    )
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(axis="x", labelsize=7)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.grid(axis="both", linewidth=0.3)
    axis.set_axisbelow(True)


def _growth(axis: Any, figures: Sequence[dict[str, Any]]) -> None:
    for figure in figures:
        # The keys of a JSON object are strings.
        per_token = {int(length): seconds for length, seconds in figure["per_token"].items()}
        micros = [1e6 * seconds for seconds in per_token.values()]
        dashes = "-" if figure["mode"] == "forward" else "--"
        label = f"{figure['name']}, {figure['mode']} ({figure['impl']})"
        axis.plot(list(per_token), micros, dashes, marker="o", markersize=4, label=label)
    axis.set_xscale("log", base=2)
    highest = max(max(figure["per_token"].values()) for figure in figures)
    axis.set_ylim(0, 1.35e6 * highest)  # room for the legend
    axis.set_title("Microseconds per token by length of the sequence")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k")
    axis.grid(linewidth=0.3)
    axis.legend(fontsize=7, loc="upper center", ncols=2)
