"""The pictures of the studies: bars by group with the range over seeds, and curves by length."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from study import spread

# Told apart by lightness too, so that a picture can be read without colours.
COLOURS = ("#b2182b", "#ef8a62", "#404040", "#999999", "#2166ac", "#67a9cf", "#5aae61", "#762a83")


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    return figure


def draw_bars(
    file: Path,
    values: Mapping[str, Mapping[str, Sequence[float]]],
    axis_name: str,
    marks: Mapping[str, Mapping[str, float]] | None = None,
    mark_name: str = "",
) -> None:
    """Draw a panel per group and a bar per name: mean over seeds, the range as error bar.

    Args:
        file: PNG to write.
        values: of each seed, by group and name; an empty list leaves a gap that says so.
        axis_name: label of the vertical axis.
        marks: single values to show beside the bars, such as those of a paper.
        mark_name: what the marks are, for the legend.
    """
    figure = new_figure(10, 4.2)
    panels = figure.subplots(1, len(values), sharey=True, squeeze=False)[0]
    for panel, (group, bars) in zip(panels, values.items(), strict=True):
        for place, (name, seeds) in enumerate(bars.items()):
            colour = COLOURS[place % len(COLOURS)]
            if seeds:
                mean, below, above = spread(seeds)
                panel.bar(place, mean, 0.7, color=colour, label=name)
                if len(seeds) > 1:
                    panel.errorbar(place, mean, [[below], [above]], color="black", capsize=4)
            else:
                panel.text(
                    place,
                    0.03,
                    "not run",
                    rotation=90,
                    ha="center",
                    color="grey",
                    transform=panel.get_xaxis_transform(),
                )
            mark = (marks or {}).get(group, {}).get(name)
            if mark is not None:
                panel.plot(
                    place, mark, "D", color="white", markeredgecolor="black", label=mark_name
                )
        panel.set_title(group)
        panel.set_xticks([])
        panel.set_xlim(-0.6, len(bars) - 0.4)
        panel.grid(axis="y", linewidth=0.3)
        panel.set_axisbelow(True)
    panels[0].set_ylabel(axis_name)
    add_legend(figure, panels)
    save(figure, file)


def draw_curves(
    file: Path,
    curves: Mapping[str, Mapping[str, Mapping[float, Sequence[float]]]],
    across: str,
    upwards: str,
) -> None:
    """Draw a panel per group and a curve per name, with the range over seeds as a band.

    Args:
        file: PNG to write.
        curves: values of each seed, by group, name and place on the horizontal axis.
        across: label of the horizontal axis.
        upwards: label of the vertical axis.
    """
    columns = min(4, len(curves))
    rows = -(-len(curves) // columns)
    figure = new_figure(10, 1.2 + 2.8 * rows)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    panels = list(grid.flat)[: len(curves)]
    for unused in list(grid.flat)[len(curves) :]:
        unused.set_axis_off()
    for panel, (group, lines) in zip(panels, curves.items(), strict=True):
        for number, (name, points) in enumerate(lines.items()):
            found = {place: spread(seeds) for place, seeds in points.items() if seeds}
            places, colour = list(found), COLOURS[4 * number % len(COLOURS)]
            panel.fill_between(
                places,
                [v.mean - v.below for v in found.values()],
                [v.mean + v.above for v in found.values()],
                color=colour,
                alpha=0.2,
                linewidth=0,
            )
            mark = "osD^vP*X"[number % 8]
            means = [v.mean for v in found.values()]
            panel.plot(places, means, color=colour, marker=mark, markersize=4, label=name)
        # The group on a line of its own, what was done with it below.
        panel.set_title(group.replace(", ", "\n", 1), fontsize=10)
        panel.set_xlabel(across)
        panel.grid(linewidth=0.3)
    for row in grid:
        row[0].set_ylabel(upwards)
    add_legend(figure, panels)
    save(figure, file)


def add_legend(figure: Any, panels: Sequence[Any]) -> None:
    """Put one entry per name below all panels."""
    entries: dict[str, Any] = {}
    for panel in panels:
        for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    if entries:
        columns = min(4, len(entries))
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns)


def save(figure: Any, file: Path) -> None:
    """Write the PNG, in a folder that may not be there yet."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
