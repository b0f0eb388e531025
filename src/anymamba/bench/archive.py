"""What is kept of a run: a section for each group of cases, and the page made of all sections.

A later run replaces the sections it measured again and leaves the others, so that a page of many
minutes can be measured in pieces. Every section names its own machine, day and command. What is
left of an interrupted run is kept too, unless it would replace something complete.
"""

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from anymamba.bench.budget import Promise
from anymamba.bench.case import GROUPS
from anymamba.bench.machine import Machine
from anymamba.bench.report import PlainTable, budget_table, tables
from anymamba.bench.results import Report
from anymamba.bench.words import NOTHING, digits
from anymamba.errors import ConfigError

__all__ = ["Sections", "add_section", "page", "rates_line", "read_sections", "section"]

# By group; everything in them is plain data.
Sections = dict[str, dict[str, Any]]

WAYS = ("native", "portable", "serial", "unbind", "torch", "transformers", "llama.cpp")


def section(report: Report, command: str, *, is_complete: bool = True) -> dict[str, Any]:
    """Return what is kept of one group.

    Args:
        report: of that group only.
        command: what made it.
        is_complete: whether every case was measured.
    """
    shown = [table._asdict() for table in tables(report)]
    return {"command": command, "is_complete": is_complete, **report.to_dict(), "tables": shown}


def read_sections(file: Path) -> Sections:
    """Return what earlier runs left in a file; nothing if there is none.

    Raises:
        ConfigError: the file is something else.
    """
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())["sections"]
        return {group: found[group] for group in GROUPS if group in found}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"bench: {file} was not written by --save of this version, so nothing can be added to "
            "it. Move it away, or choose another name."
        ) from error


def add_section(group: str, new: dict[str, Any], file: Path) -> Sections:
    """Write a section into a file, in the order of the groups, and return all of them."""
    sections = read_sections(file)
    is_worse = group in sections and sections[group]["is_complete"] and not new["is_complete"]
    if not is_worse:
        sections[group] = new
    ordered = {name: sections[name] for name in GROUPS if name in sections}
    file.write_text(json.dumps({"sections": ordered}, indent=1) + "\n")
    return ordered


def rates_line(rates: dict[str, Any]) -> str:
    """Say in one sentence how fast the machine itself is.

    Example:
        >>> rates_line({"mm": {"float32": 1.5e11}, "bandwidth": 2.8e10})
        'Large matrix product 150 GFLOP/s in float32; reading memory 28 GB/s.'
    """
    products = ", ".join(
        f"{rate / 1e9:.3g} GFLOP/s in {dtype}" for dtype, rate in rates["mm"].items()
    )
    return f"Large matrix product {products}; reading memory {rates['bandwidth'] / 1e9:.3g} GB/s."


def page(sections: Sections, *, plot: str | None = None) -> str:
    """Return the sections as a Markdown page.

    Args:
        sections: by group.
        plot: file name of the picture, relative to the page.
    """
    lines = ["# Benchmarks", "", _ABOUT, ""]
    if plot:
        lines += [f"![Speed and share of the ideal]({plot})", ""]
    found = [promise for one in sections.values() for promise in _promises(one)]
    if found:
        lines += _chapter(budget_table(found))
    summary = _summary([row for one in sections.values() for row in one["rows"]])
    if summary.rows:
        lines += _chapter(summary)
    for one in sections.values():
        for table in one["tables"]:
            lines += _chapter(PlainTable(**table), _origin(one))
    return "\n".join(lines)


_ABOUT = """\
- All ways of a case ran in turns in one process, after each had agreed with the plain loop over
  time in float32 on a shorter sequence; half types within 2% and twice the error that the loop
  itself has in that type, never more than half. Times are medians; `+-` is half the middle half of
  the runs. Freed memory is kept for the next run (`keep_freed_memory`), whoever freed it.
- `portable`: the fastest portable path at its best chunk length, compiled kernels switched off.
  `gain`: the speed over it. `serial`: autograd over the chunks. `unbind`: a loop over tokens.
- `transformers` and `llama.cpp` compute with the same weights. Of a prompt everybody returns the
  logits of the last token; we and `llama.cpp` keep the state too, `transformers` does not.
- `train`: forward and backward; bfloat16 is autocast over float32 weights. `step`: one token per
  sequence of the batch.
- `peak`: what torch's allocator held at most, beyond weights and inputs; it does not see llama.cpp.
- `ideal`: the share of the machine's limit, which was probed in the same run. Work that cannot be
  avoided is projections and SSD (chunks of 64) at the rate of a large matrix product, three times
  that for training; for a step every weight and twice the state at the rate of reading memory;
  for scan and convolution the slower of arithmetic and traffic. Half types whose product is slower
  than that of float32 are held to the rate of float32."""


def _origin(one: dict[str, Any]) -> list[str]:
    kind = "a quick run of " if one["quick"] else ""
    end = "" if one["is_complete"] else " (interrupted: not every case)"
    machine = Machine(**one["machine"])
    text = f"Made by {kind}`{one['command']}`{end} on {machine}. {rates_line(one['rates'])}"
    return [*textwrap.wrap(text, 100), ""]


def _promises(one: dict[str, Any]) -> Iterator[Promise]:
    for entry in one["budget"]:
        yield Promise(**{name: entry[name] for name in Promise._fields})


def _summary(rows: Sequence[dict[str, Any]]) -> PlainTable:
    """Return the times of all cases side by side."""
    ways = [way for way in WAYS if any(row["way"] == way and row["seconds"] for row in rows)]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        dtype = "" if row["dtype"] == "float32" else f" {row['dtype']}"
        entry = cells.setdefault((row["case"] + dtype, row["mode"]), {})
        if row["seconds"]:
            entry[row["way"]] = digits(1e3 * row["seconds"])
    lines = [
        (case, mode, *(entry.get(way, NOTHING) for way in ways))
        for (case, mode), entry in cells.items()
    ]
    return PlainTable("Milliseconds side by side", ("case", "mode", *ways), lines, 2)


def _chapter(table: PlainTable, origin: Sequence[str] = ()) -> list[str]:
    lines = [f"## {table.title}", "", *origin, *_pipes(table), ""]
    lines += [f"- {note}" for note in table.notes]
    return lines + [""] * bool(table.notes)


def _pipes(table: PlainTable) -> Iterator[str]:
    yield "| " + " | ".join(table.columns) + " |"
    rule = ["---"] * table.words + ["---:"] * (len(table.columns) - table.words)
    yield "|" + "|".join(rule) + "|"
    for row in table.rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
