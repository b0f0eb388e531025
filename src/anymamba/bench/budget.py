"""The performance budget: what was promised, what was reached, and whether that is enough."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from anymamba.bench.growth import Growth, Threads
from anymamba.bench.machine import Rates
from anymamba.bench.measure import Row

__all__ = ["Promise", "promises"]

# Columns by their name in a budget's sentence.
WHO = {
    "portable": "the portable path",
    "serial": "autograd over serial",
    "unbind": "the loop over unbind",
    "transformers": "transformers",
    "llama.cpp": "llama.cpp",
}


class Promise(NamedTuple):
    """One line of the budget.

    Attributes:
        what: case and mode.
        measure: what is compared.
        sign: ">=" or "<=".
        target: what was promised.
        reached: what was measured; None when it could not be.
        why_not: why it could not be.
    """

    what: str
    measure: str
    sign: str
    target: float
    reached: float | None
    why_not: str = ""

    @property
    def met(self) -> bool:
        """Whether the promise is kept; what could not be measured is not."""
        if self.reached is None:
            return False
        return self.reached >= self.target if self.sign == ">=" else self.reached <= self.target


def promises(
    rows: Sequence[Row], growth: Sequence[Growth], threads: Sequence[Threads], rates: Rates
) -> list[Promise]:
    """Return the lines of the budget that these measurements speak about, in its order.

    Args:
        rows: measured cases.
        growth: seconds per token by length.
        threads: seconds by threads.
        rates: of the machine.
    """
    table = _Table(rows, rates)
    return [
        *_core(table),
        *_blocks(table),
        *_scan(table),
        *_relatives(table),
        *_prompts(table, _Table(rows, rates, torch.bfloat16)),
        *_training(table, _Table(rows, rates, torch.bfloat16)),
        *(
            Promise(_title(g), "time per token, deviation over lengths", "<=", 0.10, g.deviation)
            for g in growth
        ),
        *(
            Promise(_title(t), f"{max(t.seconds)} threads over 1", ">=", 1.7, t.speedup)
            for t in threads
        ),
    ]


def _title(figure: Growth | Threads) -> str:
    return f"{figure.name}, {figure.mode} ({figure.impl})"


class _Table:
    """The rows of one dtype by case, mode and column."""

    def __init__(
        self, rows: Iterable[Row], rates: Rates, dtype: torch.dtype = torch.float32
    ) -> None:
        self.rates = rates
        self.rows = {
            (row.case.group, row.case.name, row.case.mode, row.way): row
            for row in rows
            if row.case.dtype == dtype
        }

    def cases(self, group: str) -> Iterator[tuple[str, str]]:
        """List name and mode of a group's cases."""
        return iter(dict.fromkeys((key[1], key[2]) for key in self.rows if key[0] == group))

    def get(self, group: str, name: str, mode: str, way: str) -> Row:
        return self.rows[group, name, mode, way]

    def times_ideal(self, row: Row) -> float | None:
        """Return the time over the ideal."""
        if row.timing is None:
            return None
        ideal = row.work.seconds(self.rates.limit(row.case.dtype), self.rates.bandwidth)
        return row.timing.median / ideal

    def against(self, native: Row, column: str, target: float, measure: str = "") -> Promise:
        """Compare the native kernel's speed with another column's."""
        other = self.get(native.case.group, native.case.name, native.case.mode, column)
        ratio = None
        if native.timing and other.timing:
            ratio = other.timing.median / native.timing.median
        return Promise(
            _what(native),
            measure or f"speed over {WHO[column]}",
            ">=",
            target,
            ratio,
            native.why_not or other.why_not or "",
        )

    def ideal(self, native: Row, target: float) -> Promise:
        """Compare the native time with the ideal."""
        reached = self.times_ideal(native)
        return Promise(
            _what(native), "time over ideal", "<=", target, reached, native.why_not or ""
        )


def _what(row: Row) -> str:
    is_narrow = row.case.dtype == torch.bfloat16
    return f"{row.case.name}{' bfloat16' if is_narrow else ''}, {row.case.mode}"


def _median(row: Row) -> float:
    return row.timing.median if row.timing else float("inf")


def _core(table: _Table) -> Iterator[Promise]:
    for name, mode in table.cases("core"):
        native = table.get("core", name, mode, "native")
        serial = table.get("core", name, mode, "serial")
        what = f"{name}, {mode}"
        if mode == "forward":
            # Both columns are portable paths, and the baseline is the fastest of all.
            rows = [
                row for row in (table.get("core", name, mode, "portable"), serial) if row.timing
            ]
            fastest = min(rows, key=_median, default=serial)
            yield table.against(native, fastest.way, 3.0, "speed over the portable path")
            times = table.times_ideal(native)
            share = None if times is None else 1 / times
            yield Promise(what, "share of mm", ">=", 0.65, share, native.why_not or "")
            continue
        yield table.against(native, "serial", 3.0)
        of_inputs = of_serial = None
        if native.timing:
            of_inputs = native.intermediates / native.case.inputs
        if native.timing and serial.timing:
            of_serial = native.intermediates / serial.intermediates
        why_not = native.why_not or ""
        yield Promise(what, "intermediates over inputs", "<=", 0.5, of_inputs, why_not)
        yield Promise(what, "intermediates over those of serial", "<=", 0.35, of_serial, why_not)


def _blocks(table: _Table) -> Iterator[Promise]:
    targets = {"Mamba-3 SISO": (1.3, 1.6), "Mamba-1": (1.6, 1.6)}
    for name, mode in table.cases("blocks"):
        limits = targets.get(name.partition(" b")[0])
        if limits and mode != "step":
            native = table.get("blocks", name, mode, "native")
            yield table.ideal(native, limits[mode == "train"])


def _scan(table: _Table) -> Iterator[Promise]:
    for name, mode in table.cases("scan"):
        yield table.against(table.get("scan", name, mode, "native"), "unbind", 12.0)


def _relatives(table: _Table) -> Iterator[Promise]:
    """The other Mamba-3 blocks per unit of work, beside SISO."""
    cases = list(table.cases("blocks"))
    for name, mode in cases:
        kind, _, sizes = name.partition(" b")
        siso = f"Mamba-3 SISO b{sizes}"
        if mode == "step" or kind == "Mamba-3 SISO" or not kind.startswith("Mamba-3"):
            continue
        if (siso, mode) not in cases:
            continue
        native = table.get("blocks", name, mode, "native")
        own, plain = (
            table.times_ideal(row) for row in (native, table.get("blocks", siso, mode, "native"))
        )
        ratio = own / plain if own and plain else None
        what = f"{name}, {mode}"
        yield Promise(what, "time per work over SISO's", "<=", 1.5, ratio, native.why_not or "")


def _prompts(wide: _Table, narrow: _Table) -> Iterator[Promise]:
    """Whole models, at the longest prompt that was measured."""
    for table, ideal, over_llama in (
        (wide, 1.3, {"mamba-": 2.0, "mamba2-": 1.2}),
        (narrow, 1.5, {"mamba-": 2.0, "mamba2-": 1.35}),
    ):
        cases = [table.get("prefill", *case, "native") for case in table.cases("prefill")]
        longest = max((row.case.length for row in cases), default=0)
        for native in cases:
            if native.case.length < longest:
                continue
            yield table.ideal(native, ideal)
            for family, target in over_llama.items():
                if native.case.name.startswith(family):
                    yield table.against(native, "llama.cpp", target)


def _training(wide: _Table, narrow: _Table) -> Iterator[Promise]:
    over_theirs = {"mamba-": 12.0, "mamba2-": 1.4}
    cases = [wide.get("train", *case, "native") for case in wide.cases("train")]
    longest = max((row.case.length for row in cases), default=0)
    for native in cases:
        if native.case.length == longest:
            yield wide.ideal(native, 1.6)
    for family, target in over_theirs.items():
        ours = [row for row in cases if row.case.name.startswith(family)]
        found = [wide.against(native, "transformers", target) for native in ours]
        # A peer that cannot do the longest is compared where it can.
        yield from [promise for promise in found if promise.reached is not None] or found[:1]
    for name, mode in narrow.cases("train"):
        native, other = (table.get("train", name, mode, "native") for table in (narrow, wide))
        ratio = None
        if native.timing and other.timing:
            ratio = other.timing.median / native.timing.median
        why_not = native.why_not or other.why_not or ""
        yield Promise(_what(native), "speed over float32", ">=", 1.6, ratio, why_not)
