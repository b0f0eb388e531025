"""The pictures of the studies: bars by group with the range over seeds, and curves by length."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from report import spread

# Dark and light in turn; names stand beside what they colour wherever there is room.
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
    axis_names: Mapping[str, str],
    marks: Mapping[str, Mapping[str, float]] | None = None,
    mark_name: str = "",
    lines: Mapping[str, tuple[str, Sequence[float]]] | None = None,
    without_zero: Collection[str] = (),
) -> None:
    """Draw a panel per title and a bar per name: mean over seeds, the range as error bar.

    Args:
        file: PNG to write.
        values: of each seed, by title and name; an empty list leaves a gap that says so. All titles
            have the same names.
        axis_names: what is measured, by title.
        marks: single values to show beside the bars, by title and name, such as those of a paper.
        mark_name: what the marks are, for the legend.
        lines: by title, what else to compare with, and its values: a line through all bars.
        without_zero: titles whose values lie close together: dots, on an axis that ends near them.
    """
    names = list(next(iter(values.values())))
    figure = new_figure(10, 1.5 + 0.36 * len(names))
    panels = figure.subplots(1, len(values), sharey=True, squeeze=False)[0]
    for panel, (title, bars) in zip(panels, values.items(), strict=True):
        for place, name in enumerate(names):
            draw_bar(panel, place, bars[name], is_dot=title in without_zero)
            mark = (marks or {}).get(title, {}).get(name)
            if mark is not None:
                panel.plot(mark, place, "D", color="white", markeredgecolor="black", zorder=3)
        if title in (lines or {}):
            name, found = (lines or {})[title]
            mean, below, above = spread(found)
            panel.axvspan(mean - below, mean + above, color="grey", alpha=0.3, linewidth=0)
            panel.axvline(mean, color="black", linestyle="dashed", linewidth=1, label=name)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel(axis_names[title], fontsize=9)
        panel.grid(axis="x", linewidth=0.3)
        panel.set_axisbelow(True)
        panel.margins(x=0.08)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    if marks:
        panels[-1].plot([], [], "D", color="white", markeredgecolor="black", label=mark_name)
    add_legend(figure, panels)
    save(figure, file)


def draw_bar(panel: Any, place: int, seeds: Sequence[float], *, is_dot: bool) -> None:
    """Draw the mean of some seeds as a bar or a dot, and their range."""
    if not seeds:
        panel.text(
            0.03, place, "not run", va="center", color="grey", transform=panel.get_yaxis_transform()
        )
        return
    mean, below, above = spread(seeds)
    colour = COLOURS[place % len(COLOURS)]
    if is_dot:
        panel.plot(mean, place, "o", color=colour)
    else:
        panel.barh(place, mean, 0.7, color=colour)
    if len(seeds) > 1:
        panel.errorbar(mean, place, xerr=[[below], [above]], color="black", capsize=3, linewidth=1)


def draw_curves(
    file: Path,
    curves: Mapping[str, Mapping[str, Mapping[str, Mapping[float, Sequence[float]]]]],
    axis_names: tuple[str, str],
    levels: Mapping[str, float],
    level_name: str,
    border: float,
    border_name: str,
) -> None:
    """Draw a grid of panels and a curve per name, with the range over seeds as a band.

    Args:
        file: PNG to write.
        curves: values of each seed, by column, row, name and place on the horizontal axis; a panel
            without curves is left out. All columns have the same rows.
        axis_names: of the horizontal and the vertical axis.
        levels: what guessing reaches, or the like, by column.
        level_name: what that is, for the legend.
        border: place on the horizontal axis that all panels mark.
        border_name: what is there.
    """
    titles = list(next(iter(curves.values())))
    figure = new_figure(10, 1.0 + 2.3 * len(titles))
    grid = figure.subplots(len(titles), len(curves), sharex=True, sharey=True, squeeze=False)
    for column, (group, rows) in enumerate(curves.items()):
        for row, title in enumerate(titles):
            panel = grid[row][column]
            if not rows[title]:
                panel.set_axis_off()
                continue
            for number, (name, points) in enumerate(rows[title].items()):
                draw_curve(panel, number, name, points)
            panel.axhline(levels[group], color="black", linestyle="dotted", label=level_name)
            panel.axvline(border, color="grey", linestyle="dashed", linewidth=1, label=border_name)
            panel.set_title(f"{group}, {title}", fontsize=10)
            panel.set_xlabel(axis_names[0], fontsize=9)
            panel.set_ylabel(axis_names[1], fontsize=9)
            panel.tick_params(labelbottom=True, labelleft=True)
            panel.grid(linewidth=0.3)
    add_legend(figure, list(grid.flat))
    save(figure, file)


def draw_curve(panel: Any, number: int, name: str, points: Mapping[float, Sequence[float]]) -> None:
    """Draw the mean over seeds and their range at each place."""
    found = {place: spread(seeds) for place, seeds in points.items() if seeds}
    places, colour = list(found), COLOURS[4 * number % len(COLOURS)]
    low = [v.mean - v.below for v in found.values()]
    high = [v.mean + v.above for v in found.values()]
    panel.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
    means = [v.mean for v in found.values()]
    mark = "osD^vP*X"[number % 8]
    panel.plot(places, means, color=colour, marker=mark, markersize=4, label=name)


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
