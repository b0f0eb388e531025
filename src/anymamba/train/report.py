"""What a run leaves behind for people: `loss.png` and `report.md`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anymamba.errors import ConfigError
from anymamba.io import replacing
from anymamba.models import MambaLM
from anymamba.train.metrics import read_metrics
from anymamba.train.recipe import recipe_to_toml
from anymamba.train.recipe_sections import Recipe
from anymamba.train.run_folder import RunFolder

__all__ = ["draw_curves", "leave_papers", "write_report"]

INK, ACCENT, SOFT = "#1b2a41", "#d1495b", "#8da9c4"


def leave_papers(folder: RunFolder, recipe: Recipe, lm: MambaLM) -> None:
    """Draw the curves of a finished run and write its report, from its metrics.

    Raises:
        ConfigError: matplotlib is not installed.
        CheckpointError: the folder cannot be written.
    """
    entries = read_metrics(folder.metrics)
    steps = [entry for entry in entries if entry["kind"] == "step"]
    config = lm.config
    parameters = sum(parameter.numel() for parameter in lm.parameters())
    family = config.layer.replace("Mamba", "Mamba-")
    facts = {"model": f"{family}, {config.n_layer} layers of width {config.d_model}"}
    facts["parameters"] = f"{parameters:,}"
    if steps:
        last = steps[-1]
        facts["trained"] = f"{last['step']} steps, {last['tokens']:,} tokens"
        facts["time"] = f"{last['seconds']:.0f} s of training"
        # The middle one: the first reports include warm-ups of the machine.
        speeds = sorted(entry["tokens_per_second"] for entry in steps)
        shares = sorted(entry["share_of_ideal"] for entry in steps)
        middle = len(steps) // 2
        facts["speed"] = f"{speeds[middle]:,.0f} tokens/s, {shares[middle]:.0%} of ideal"
    if valid := series(entries, "valid", "bits_per_byte"):
        facts["held out"] = f"{valid[-1][1]:.4f} bits per byte"
    facts["tokenizer"] = recipe.data.tokenizer
    title = f"{family}, {parameters / 1e6:.2f} M parameters"
    draw_curves(entries, folder.picture, title)
    write_report(folder.report, entries, recipe_to_toml(recipe), facts)


def draw_curves(entries: Iterable[Mapping[str, Any]], file: Path, title: str) -> None:
    """Draw training and validation loss over steps, in bits per byte, into a PNG.

    Args:
        entries: metrics of a run; at least one of kind "step" or "valid".
        file: where to write.
        title: above the curves.

    Raises:
        ConfigError: matplotlib is not installed.
        CheckpointError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"draw_curves: the package matplotlib must be installed; {error}. "
            "Install it: pip install 'anymamba[train]'."
        ) from error
    steps = series(entries, "step", "bits_per_byte")
    part, whole = held_out(entries)
    # The object interface: no window system is asked for and no global state is left behind.
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if steps:
        axes.plot(
            *zip(*steps, strict=True), color=SOFT, linewidth=0.9, label="training, each report"
        )
        smooth = smoothed(steps)
        axes.plot(*zip(*smooth, strict=True), color=INK, linewidth=1.8, label="training, smoothed")
    # Two lines: a part of the text is easier or harder than all of it, so a step from one to the
    # other says nothing about the model.
    for points, marker, label in ((part, ".", "held out, a part"), (whole, "D", "held out, all")):
        if points:
            axes.plot(
                *zip(*points, strict=True), color=ACCENT, marker=marker, markersize=6, label=label
            )
    if valid := whole or part:
        step, value = valid[-1]
        axes.annotate(
            f"{value:.3f}",
            (step, value),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=ACCENT,
            annotation_clip=False,
        )
    _frame(axes, [*steps, *part, *whole], title)
    with replacing("draw_curves", file) as stream:
        figure.savefig(stream, format="png")


def _frame(axes: Any, points: Sequence[tuple[int, float]], title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    values = sorted(value for _, value in points)
    if values:
        low, high = values[0], values[int(0.98 * (len(values) - 1))]
        # The first steps fall from 8 bits: showing all of that would flatten the rest.
        axes.set_ylim(low - 0.08 * (high - low + 0.1), high + 0.05 * (high - low + 0.1))
    axes.grid(True, color="#e5e9f0", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)


def series(entries: Iterable[Mapping[str, Any]], kind: str, name: str) -> list[tuple[int, float]]:
    """Return (step, value) of the finite values of one kind of entry."""
    return [
        (entry["step"], entry[name])
        for entry in entries
        if entry["kind"] == kind
        and isinstance(entry.get(name), float)
        and math.isfinite(entry[name])
    ]


def held_out(entries: Iterable[Mapping[str, Any]]) -> tuple[list[tuple[int, float]], ...]:
    """Return (step, bits per byte) on a part of the held-out text, and on all of it."""
    part, whole = [], []
    for entry in entries:
        (whole if entry.get("of_all") else part).append(entry)
    return series(part, "valid", "bits_per_byte"), series(whole, "valid", "bits_per_byte")


def smoothed(points: Sequence[tuple[int, float]], span: float = 0.05) -> list[tuple[int, float]]:
    """Return running means over about `span` of all points, both sides of each.

    Example:
        >>> smoothed([(1, 1.0), (2, 3.0), (3, 2.0)], span=0.5)
        [(1, 2.0), (2, 2.0), (3, 2.5)]
    """
    half = max(1, round(span * len(points) / 2))
    means: list[tuple[int, float]] = []
    for place, (step, _) in enumerate(points):
        near = points[max(0, place - half) : place + half + 1]
        means.append((step, sum(value for _, value in near) / len(near)))
    return means


def write_report(
    file: Path, entries: Sequence[Mapping[str, Any]], recipe: str, facts: Mapping[str, str]
) -> None:
    """Write a short page on a run: what was trained, how it went, what it writes, how to go on.

    Args:
        file: where to write; `loss.png` is expected beside it.
        entries: the metrics of the run.
        recipe: the resolved recipe, as TOML.
        facts: rows of the table at the top, such as parameters and speed.

    Raises:
        CheckpointError: the file cannot be written.
    """
    rows = [f"| {name} | {value} |" for name, value in facts.items()]
    parts = ["# Report of a training run", "", "| what | value |", "|---|---|", *rows, ""]
    parts += ["![loss](loss.png)", ""]
    for points, what in zip(held_out(entries), ("a part of it", "all of it"), strict=True):
        if points:
            parts += [f"## Held out, {what}", "", "| step | bits per byte |", "|---:|---:|"]
            parts += [f"| {step} | {value:.4f} |" for step, value in _thinned(points)]
            parts.append("")
    skips = [entry for entry in entries if entry["kind"] == "skip"]
    if skips:
        parts += ["## Skipped steps", ""]
        parts += [f"- step {entry['step']}: {entry['why']}" for entry in _thinned(skips)]
        parts.append("")
    if samples := [entry for entry in entries if entry["kind"] == "sample"]:
        parts += ["## Samples", ""]
        for entry in _thinned(samples, 4):
            text = entry["prompt"] + entry["text"]
            parts += [f"After step {entry['step']}:", "", *_fenced(text, "text"), ""]
    parts += ["## Recipe", "", *_fenced(recipe, "toml"), ""]
    with replacing("write_report", file) as stream:
        stream.write("\n".join(parts).encode("utf-8", errors="replace"))


def _fenced(text: str, language: str) -> list[str]:
    """Return a code block whose fence no line of the text can close."""
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}{language}", text.rstrip("\n"), fence]


def _thinned(entries: Sequence[Any], most: int = 12) -> list[Any]:
    """Return at most `most` entries, the first and the last among them."""
    if len(entries) <= most:
        return list(entries)
    places = {round(place * (len(entries) - 1) / (most - 1)) for place in range(most)}
    return [entries[place] for place in sorted(places)]
