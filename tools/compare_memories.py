"""Print the budget of decoding by the memory that each case met, from several runs of the bench.

    for run in 1 2 3; do anymamba bench decode --json > decode-$run.json; done
    python tools/compare_memories.py decode-*.json

The cores of a virtual machine lie on one path to memory or on two, and may move between the cases
of a run: then all tokens of a case had memory at one rate, those of the next at twice that. A line
is printed with what it reached at either, the median over the runs.
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Line(NamedTuple):
    """A line of the budget as one run measured it."""

    what: str
    sign: str
    target: float
    reached: float
    rates: tuple[float, ...]


def decode_part(document: dict[str, Any]) -> dict[str, Any]:
    """Return what a document says of decoding: that of one run, or one that `--save` adds to."""
    return document.get("sections", {}).get("decode", document)


def lines_of(report: dict[str, Any]) -> Iterable[Line]:
    """Return the lines of a run with the rates of memory that their cases met."""
    ours = [figure for figure in report["decoding"] if figure["engine"] == "anymamba"]
    rates = {(x["model"], x["format"], x["rows"]): x["bandwidth"] for x in ours}
    for promise in report["budget"]:
        if promise["reached"] is None:
            continue
        model, form, decoding = promise["what"].split(", ")
        rows = int(decoding.removeprefix("decoding "))
        cases = {rows, 1} if promise["measure"] == "speed over one row" else {rows}
        yield Line(
            f"{promise['what']}: {promise['measure']}",
            promise["sign"],
            promise["target"],
            promise["reached"],
            tuple(rates[model, form, count] for count in sorted(cases)),
        )


def border_between(rates: list[float]) -> float:
    """Return the rate that divides slow memory from fast; infinite where there is one kind only."""
    low, high = min(rates), max(rates)
    return math.sqrt(low * high) if high > 1.4 * low else math.inf


def described(line: Line, reached: list[float]) -> str:
    """Say what was reached, how often it was measured, and whether it is enough."""
    if not reached:
        return "-"
    value = statistics.median(reached)
    is_met = value >= line.target if line.sign == ">=" else value <= line.target
    number = f"{value:.2f}x" if line.target >= 1 else f"{value:.0%}"
    return f"{number} ({len(reached)}){'' if is_met else ' missed'}"


def main() -> None:
    """Read the reports and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", nargs="+", type=Path, help="of anymamba bench --json or --save")
    reports = [decode_part(json.loads(file.read_text())) for file in parser.parse_args().report]
    found = [line for report in reports for line in lines_of(report)]
    if not found:
        raise SystemExit("no line about decoding: run `anymamba bench decode --json`")
    rates = [rate for line in found for rate in line.rates]
    border = border_between(rates)
    reached: dict[str, dict[bool, list[float]]] = defaultdict(lambda: {False: [], True: []})
    for line in found:
        kinds = {rate > border for rate in line.rates}
        if len(kinds) == 1:  # else one row had other memory than eight
            reached[line.what][kinds.pop()].append(line.reached)
    for is_fast in (False, True):
        kind = [rate / 1e9 for rate in rates if (rate > border) is is_fast]
        if kind:
            print(f"{'fast' if is_fast else 'slow'}: {min(kind):.0f} to {max(kind):.0f} GB/s")
    known = {line.what: line for line in found}
    print(f"{'':58}{'target':>8}  {'slow':18}fast")
    for what, line in known.items():
        target = f"{line.target:.2f}x" if line.target >= 1 else f"{line.target:.0%}"
        slow, fast = (described(line, reached[what][is_fast]) for is_fast in (False, True))
        print(f"{what:58}{target:>8}  {slow:18}{fast}")


if __name__ == "__main__":
    main()
