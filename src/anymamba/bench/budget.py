"""The performance budget: what was promised, what was reached, and whether that is enough."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from anymamba.bench.decode import Decoding
from anymamba.bench.growth import Growth, Threads
from anymamba.bench.machine import Rates
from anymamba.bench.measure import Row

__all__ = ["Promise", "decode_promises", "promises"]

# Columns by their name in a budget's sentence.
WHO = {
    "portable": "the portable path",
    "serial": "autograd over serial",
    "unbind": "the loop over unbind",
    "transformers": "transformers",
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
        *_models(table),
        *(
            Promise(_title(g), "time per token, deviation over lengths", "<=", 0.10, g.deviation)
            for g in growth
        ),
        *(
            Promise(_title(t), f"{max(t.seconds)} threads over 1", ">=", 1.7, t.speedup)
            for t in threads
        ),
    ]


# Shares of the rate of reading memory: one row, and eight rows.
DECODE_SHARES = {"float32": 0.90, "bfloat16": 0.90, "int8": 0.80, "int4": 0.65}
DECODE_SHARE_OF_EIGHT = 0.70


def decode_promises(figures: Sequence[Decoding], rates: Rates) -> list[Promise]:
    """Return the lines of the budget about decoding.

    Args:
        figures: measured models, formats and rows.
        rates: of the machine.
    """
    found = []
    alone = {(x.model, x.format): x for x in figures if x.rows == 1}
    for figure in figures:
        what = f"{figure.model}, {figure.format}, decoding {figure.rows}"
        share = figure.share(rates.bandwidth) if figure.ok else None
        if figure.rows == 1:
            target = DECODE_SHARES[figure.format]
            found.append(Promise(what, "share of the ideal", ">=", target, share))
        elif figure.rows == 8 and figure.format != "float32":
            found.append(Promise(what, "share of the ideal", ">=", DECODE_SHARE_OF_EIGHT, share))
        elif figure.rows == 8 and (one := alone.get((figure.model, figure.format))):
            ratio = figure.tokens_per_second / one.tokens_per_second if figure.ok else None
            found.append(Promise(what, "speed over one row", ">=", 4.0, ratio))
    return found


def _title(figure: Growth | Threads) -> str:
    return f"{figure.name}, {figure.mode} ({figure.impl})"


class _Table:
    """The float32 rows by case, mode and column."""

    def __init__(self, rows: Iterable[Row], rates: Rates) -> None:
        self.rates = rates
        self.rows = {
            (row.case.group, row.case.name, row.case.mode, row.way): row
            for row in rows
            if row.case.dtype == torch.float32
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
            f"{native.case.name}, {native.case.mode}",
            measure or f"speed over {WHO[column]}",
            ">=",
            target,
            ratio,
            native.why_not or other.why_not or "",
        )

    def ideal(self, native: Row, target: float) -> Promise:
        """Compare the native time with the ideal."""
        what = f"{native.case.name}, {native.case.mode}"
        reached = self.times_ideal(native)
        return Promise(what, "time over ideal", "<=", target, reached, native.why_not or "")


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


def _models(table: _Table) -> Iterator[Promise]:
    for name, mode in table.cases("prefill"):
        yield table.ideal(table.get("prefill", name, mode, "native"), 1.3)
    for name, mode in table.cases("train"):
        native = table.get("train", name, mode, "native")
        yield table.ideal(native, 1.6)
        if name.startswith("mamba-"):
            yield table.against(native, "transformers", 12.0)
        if name.startswith("mamba2-"):
            yield table.against(native, "transformers", 1.4)
