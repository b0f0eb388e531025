"""The report as tables of words, and as a Markdown page; the terminal dresses the same tables."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from anymamba.bench.budget import Promise
from anymamba.bench.machine import Rates
from anymamba.bench.measure import Row, dtype_name
from anymamba.bench.suite import Report

__all__ = ["PlainTable", "markdown", "rates_line", "tables"]

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
WAYS = ("native", "portable", "serial", "unbind", "torch", "transformers")
NOTHING = "-"


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
    if report.decoding:
        found.append(_decoding(report))
    if report.promises:
        found.append(_budget(report.promises))
    if report.growth:
        found.append(_growth(report))
    if report.threads:
        found.append(_threads(report))
    if report.profiles:
        found.append(_profiles(report))
    return found


def rates_line(rates: Rates) -> str:
    """Say in one sentence how fast the machine itself is."""
    products = ", ".join(
        f"{rates.mm(dtype) / 1e9:.3g} GFLOP/s in {dtype_name(dtype)}" for dtype in rates.products
    )
    return f"Large matrix product {products}; reading memory {rates.bandwidth / 1e9:.3g} GB/s."


def markdown(report: Report, *, plot: str | None = None, command: str = "anymamba bench") -> str:
    """Return the report as a Markdown page.

    Args:
        report: what was measured.
        plot: file name of the picture, relative to the page.
        command: what made the page.
    """
    lines = [
        "# Benchmarks",
        "",
        *textwrap.wrap(f"Made by `{command}` on {report.machine}.", 100),
        "",
        *textwrap.wrap(rates_line(report.rates), 100),
        "",
        _ABOUT,
        "",
    ]
    if report.quick:
        lines += ["This was a quick run: few repetitions, and not every case.", ""]
    if plot:
        lines += [f"![Speed and share of the ideal]({plot})", ""]
    for table in [_summary(report), *tables(report)]:
        lines += [f"## {table.title}", "", *_pipes(table), ""]
        lines += [f"- {note}" for note in table.notes]
        lines += [""] * bool(table.notes)
    return "\n".join(lines)


_ABOUT = """\
- All ways of a case ran in turns in one process, after each had agreed with the plain loop over
  time on a shorter sequence. Times are medians; `+-` is half the middle half of the runs.
- `portable`: the fastest portable path at its best chunk length, compiled kernels switched off.
  `gain`: the speed over it. `serial`: autograd over the chunks. `unbind`: a loop over tokens.
- `train`: forward and backward. `step`: one token per sequence of the batch.
- `peak`: what torch's allocator held at most, beyond weights and inputs.
- `ideal`: the share of the machine's limit, which was probed in the same run. Work that cannot be
  avoided is projections and SSD (chunks of 64) at the rate of a large matrix product, three times
  that for training; for a step every weight and twice the state at the rate of reading memory;
  for scan and convolution the slower of arithmetic and traffic. Half types whose product is slower
  than that of float32 are held to the rate of float32."""


def _group(report: Report, group: str, title: str) -> PlainTable:
    rows = [row for row in report.rows if row.case.group == group]
    lines, before = [], ("", "")
    for row in rows:
        # `Mamba-3 has none` twenty times is no information: the notes say it once.
        if row.timing is None and row.ok and row.way not in ("native", "portable"):
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
        f"{digits(row.peak / 1e6)} MB" if row.peak >= 1e5 else f"{digits(row.peak / 1e3)} kB",
        NOTHING if share is None else percent(share),
        NOTHING if ratio is None else f"{digits(ratio)}x",
    )


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds.

    Example:
        >>> milliseconds(0.0123456), milliseconds(12.0)
        ('12.3 ms', '12000 ms')
    """
    return f"{digits(1e3 * seconds)} ms"


def count(number: float) -> str:
    """Return a number of tokens per second.

    Example:
        >>> count(12.3), count(4567.0), count(1234567.0)
        ('12.3', '4.57 k', '1.23 M')
    """
    for size, letter in ((1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{digits(number / size)}{letter}"
    return digits(number)


def percent(share: float) -> str:
    """Return a share in percent.

    Example:
        >>> percent(0.654), percent(0.0123), percent(0.0001)
        ('65%', '1.2%', '<0.1%')
    """
    if share < 1e-3:
        return "<0.1%"
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def digits(number: float) -> str:
    """Return a number with three digits, or all of them in front of the point.

    Example:
        >>> digits(0.12345), digits(12.345), digits(12345.6)
        ('0.123', '12.3', '12346')
    """
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


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


def _summary(report: Report) -> PlainTable:
    """Return the times of all cases side by side."""
    ways = [way for way in WAYS if any(row.way == way and row.timing for row in report.rows)]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in report.rows:
        entry = cells.setdefault((_name(row), row.case.mode), {})
        if row.timing is not None:
            entry[row.way] = digits(1e3 * row.timing.median)
    rows = [
        (case, mode, *(entry.get(way, NOTHING) for way in ways))
        for (case, mode), entry in cells.items()
    ]
    return PlainTable("Milliseconds side by side", ("case", "mode", *ways), rows, 2)


def _budget(found: Sequence[Promise]) -> PlainTable:
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
        numbers = (
            milliseconds(figure.median),
            f"{figure.tail:.2f}x",
            count(figure.tokens_per_second),
            f"{digits(figure.bytes_per_token / 1e6)} MB",
            percent(figure.share(report.rates.bandwidth)),
        )
        if not figure.ok:
            numbers = ("WRONG", *[NOTHING] * 4)
        rows.append((figure.model, figure.format, str(figure.rows), *numbers))
    columns = ("model", "weights", "rows", "time", "p99", "tokens/s", "per token", "ideal")
    note = (
        "p99: the slowest hundredth over the median. Per token: weights / rows + twice the state."
    )
    return PlainTable("Decoding, random weights", columns, rows, 2, (note,))


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
        )
        for figure in report.threads
    ]
    columns = ("operator", "mode", "way", "1 thread", f"{most} threads", "gain")
    return PlainTable("Threads, 2048 tokens", columns, rows, 3)


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
    note = "our operators: what they spend outside of torch's, in compiled kernels or in Python."
    return PlainTable("Profile of the blocks", columns, rows, 4, (note,))


def _pipes(table: PlainTable) -> Iterator[str]:
    yield "| " + " | ".join(table.columns) + " |"
    rule = ["---"] * table.words + ["---:"] * (len(table.columns) - table.words)
    yield "|" + "|".join(rule) + "|"
    for row in table.rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
