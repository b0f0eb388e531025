"""The report as tables of words; the terminal and the page dress the same tables."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from anymamba.bench.budget import Promise
from anymamba.bench.decode import OURS
from anymamba.bench.llama import LLAMA_FORMATS
from anymamba.bench.measure import Row
from anymamba.bench.results import Report
from anymamba.bench.words import (
    NOTHING,
    count,
    digits,
    dtype_name,
    megabytes,
    milliseconds,
    percent,
)

__all__ = ["PlainTable", "budget_table", "tables"]

TITLES = {
    "core": "SSD core",
    "scan": "Selective scan",
    "conv": "Causal convolution with SiLU",
    "small": "Blocks, width 256",
    "blocks": "Blocks, width 768",
    "prefill": "Whole models: reading a prompt",
    "train": "Whole models: forward and backward of the loss",
}
COLUMNS = ("case", "mode", "way", "time", "+-", "tokens/s", "peak", "ideal", "gain")


class PlainTable(NamedTuple):
    """A table of words: the first `words` columns are text, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    words: int
    notes: tuple[str, ...] = ()


def tables(report: Report) -> list[PlainTable]:
    """Return every table of a report that has rows."""
    found = [
        _group(report, group, title)
        for group, title in TITLES.items()
        if any(row.case.group == group for row in report.rows)
    ]
    if report.memory:
        found.append(_memory(report))
    if report.decoding:
        found.append(_decoding(report))
    if report.growth:
        found.append(_growth(report))
    if report.threads:
        found.append(_threads(report))
    if report.profiles:
        found.append(_profiles(report))
    return found


def _group(report: Report, group: str, title: str) -> PlainTable:
    rows = [row for row in report.rows if row.case.group == group]
    lines, before = [], ("", "")
    for row in rows:
        # `Mamba-3 has none` twenty times is no information: the notes say it once.
        if row.timing is None and row.ok and row.way != "native":
            continue
        case, mode = _name(row), row.case.mode
        shown = (case if case != before[0] else "", mode if (case, mode) != before else "")
        before = case, mode
        lines.append((*shown, _way(row), *_numbers(report, row)))
    return PlainTable(title, COLUMNS, lines, 3, tuple(_reasons(rows)))


def _numbers(report: Report, row: Row) -> tuple[str, ...]:
    if row.timing is None:
        return ("WRONG" if not row.ok else NOTHING, *[NOTHING] * 5)
    share, ratio = report.share_of_ideal(row), report.over_portable(row)
    return (
        milliseconds(row.timing.median),
        f"{row.timing.spread:.0%}",
        count(row.tokens_per_second or 0.0),
        megabytes(row.peak) if row.peak else NOTHING,
        NOTHING if share is None else percent(share),
        NOTHING if ratio is None else f"{digits(ratio)}x",
    )


def _name(row: Row) -> str:
    dtype = dtype_name(row.case.dtype)
    return row.case.name if dtype == "float32" else f"{row.case.name} {dtype}"


def _way(row: Row) -> str:
    return f"{row.way}, {row.note}" if row.note else row.way


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Say once why a column has no number."""
    told: dict[str, list[str]] = {}
    for row in rows:
        if row.why_not is not None:
            told.setdefault(f"{row.way}: {row.why_not}.", []).append(
                f"{_name(row)} {row.case.mode}"
            )
    for reason, where in told.items():
        yield reason if len(where) > 2 else f"{reason} ({'; '.join(where)})"


def budget_table(found: Sequence[Promise]) -> PlainTable:
    """Return the lines of the budget: promised, reached, and whether that is enough."""
    rows = []
    for promise in found:
        reached = NOTHING if promise.reached is None else _ratio(promise, promise.reached)
        target = f"{promise.sign} {_ratio(promise, promise.target)}"
        verdict = "met" if promise.met else "not met"
        rows.append((promise.what, promise.measure, verdict, target, reached))
    notes = dict.fromkeys(x.why_not for x in found if x.reached is None and x.why_not)
    met = sum(promise.met for promise in found)
    return PlainTable(
        f"Budget: {met} of {len(found)} lines met",
        ("what", "measure", "verdict", "target", "reached"),
        rows,
        3,
        tuple(f"not measured: {note}." for note in notes),
    )


def _ratio(promise: Promise, number: float) -> str:
    as_share = promise.measure.startswith(("share", "time per token"))
    return f"{number:.0%}" if as_share else f"{number:.2f}x"


def _growth(report: Report) -> PlainTable:
    lengths = list(report.growth[0].per_token)
    rows = [
        (
            figure.name,
            figure.mode,
            figure.impl,
            *(digits(1e6 * figure.per_token[length]) for length in lengths),
            f"{figure.deviation:.0%}",
        )
        for figure in report.growth
    ]
    columns = ("operator", "mode", "way", *(f"{length / 1024:g}k" for length in lengths), "+-")
    return PlainTable("Microseconds per token by length", columns, rows, 3)


def _decoding(report: Report) -> PlainTable:
    rows = []
    for figure in report.decoding:
        # As above: an absent peer is told once, in the notes.
        if figure.why_not and figure.engine != OURS:
            continue
        numbers = ("WRONG" if not figure.ok else NOTHING, *[NOTHING] * 5)
        if figure.has_speed:
            numbers = (
                milliseconds(figure.median),
                f"{figure.tail:.2f}x",
                count(figure.tokens_per_second),
                f"{digits(figure.bytes_per_token / 1e6)} MB",
                f"{digits(figure.bandwidth / 1e9)} GB/s",
                percent(figure.share),
            )
        weights = figure.format if figure.engine == OURS else LLAMA_FORMATS[figure.format]
        rows.append((figure.model, figure.engine, weights, str(figure.rows), *numbers))
    who, measured = ("model", "by", "weights", "rows"), ("time", "p99", "tokens/s")
    columns = (*who, *measured, "reads", "memory", "ideal")
    note = (
        "p99: the slowest hundredth over the median. reads: weights / rows + twice the state. "
        "memory: the rate of reading it just before and after the tokens, which may double from "
        "one second to the next on a virtual machine. ideal: the share of it, token by token; over "
        "100% where a part of weights or states stays in the caches from token to token."
    )
    reasons = dict.fromkeys(
        f"{x.engine}: {x.why_not} ({x.model})." for x in report.decoding if x.why_not
    )
    return PlainTable("Decoding, random weights", columns, rows, 3, (note, *reasons))


def _memory(report: Report) -> PlainTable:
    rows = []
    for figure in report.memory:
        numbers = (NOTHING, NOTHING)
        if figure.peak is not None:
            numbers = (megabytes(figure.peak), f"{digits(figure.seconds)} s")
        if not figure.ok:
            numbers = ("WRONG", NOTHING)
        rows.append((f"{figure.model} b1 s{figure.length}", figure.way, *numbers))
    reasons = (
        f"{x.way}: {x.why_not} ({x.model} b1 s{x.length})." for x in report.memory if x.why_not
    )
    note = (
        "peak: gradients included, weights not; ours by torch's allocator, a peer's by the memory "
        "of its process; float32, without the optimiser."
    )
    columns = ("training step", "way", "peak", "time")
    return PlainTable("Memory of a training step", columns, rows, 2, (note, *reasons))


def _threads(report: Report) -> PlainTable:
    most = max(report.threads[0].seconds)
    rows = [
        (
            figure.name,
            figure.mode,
            figure.impl,
            milliseconds(figure.seconds[1]),
            milliseconds(figure.seconds[most]),
            f"{figure.speedup:.2f}x",
            f"{figure.mm_speedup:.2f}x",
        )
        for figure in report.threads
    ]
    columns = ("operator", "mode", "way", "1 thread", f"{most} threads", "gain", "gain of mm")
    note = "gain of mm: what the same threads bring a large matrix product, in turns with ours."
    return PlainTable("Threads, 2048 tokens", columns, rows, 3, (note,))


def _profiles(report: Report) -> PlainTable:
    rows = [
        (
            profile.name,
            profile.mode,
            profile.way,
            ", ".join(f"{name} {share:.0%}" for name, share in profile.shares.items()),
        )
        for profile in report.profiles
    ]
    columns = ("block", "mode", "way", "where the time goes")
    note = "anymamba::...: what our operators spend outside of torch's, in kernels or in Python."
    return PlainTable("Profile of the blocks", columns, rows, 4, (note,))
