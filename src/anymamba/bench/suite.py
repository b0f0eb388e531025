"""The whole bench: which cases there are, in which order, and how long they may take."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from anymamba.bench.blocks import LARGE, SMALL, block_cases
from anymamba.bench.budget import Promise, decode_promises, promises
from anymamba.bench.case import GROUPS, MODES, Case
from anymamba.bench.decode import Decoding, decode_figures
from anymamba.bench.growth import Growth, Threads, growth_figures, thread_figures
from anymamba.bench.lms import PUBLISHED, lm_cases, prefill_cases
from anymamba.bench.machine import Machine, Rates, describe_machine
from anymamba.bench.measure import Effort, Row, dtype_name, measure
from anymamba.bench.operators import conv_cases, core_cases, scan_cases
from anymamba.bench.portable import CoreSizes
from anymamba.bench.profile import Profile, profile_block
from anymamba.errors import ConfigError

__all__ = ["Report", "Suite", "run_suite", "suite_cases"]

# These take most of the time of a run, and the others measure the same code.
QUICK_BLOCKS = ("Mamba-2", "Mamba-3 SISO")
QUICK_MODELS = ("mamba2-130m",)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What to measure.

    Attributes:
        groups: which tables; all of them by default.
        modes: any of "forward", "train" and "step".
        quick: about a minute instead of seven: fewer runs, fewer blocks, shorter sequences for the
            whole models.
        seconds: for each way of a case; by default 1, or 0.2 when quick.
    """

    groups: Sequence[str] = GROUPS
    modes: Sequence[str] = MODES
    quick: bool = False
    seconds: float | None = None

    def __post_init__(self) -> None:
        """Refuse names that mean nothing."""
        for what, given, known in (("group", self.groups, GROUPS), ("mode", self.modes, MODES)):
            if unknown := [name for name in given if name not in known]:
                raise ConfigError(
                    f"bench: a {what} must be one of {', '.join(known)}; got {unknown[0]!r}."
                )

    @property
    def effort(self) -> Effort:
        """How long to measure a case."""
        if self.quick:
            return Effort(self.seconds or 0.2, least=2, most=10)
        return Effort(self.seconds or 1.0, least=3, most=50)


@dataclass(kw_only=True)
class Report:
    """What was measured, on which machine."""

    machine: Machine
    rates: Rates
    quick: bool = False
    rows: list[Row] = field(default_factory=list)
    decoding: list[Decoding] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)
    threads: list[Threads] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)

    @property
    def red(self) -> list[Row]:
        """Rows that disagree with the reference."""
        return [row for row in self.rows if not row.ok]

    @property
    def wrong(self) -> list[str]:
        """What disagrees with the reference, or a decoder with its modules."""
        return [
            *(f"{row.case.title} ({row.way})" for row in self.red),
            *(f"{x.model}, {x.format}, decoding {x.rows}" for x in self.decoding if not x.ok),
        ]

    @property
    def promises(self) -> list[Promise]:
        """The lines of the budget that were measured."""
        return [
            *promises(self.rows, self.growth, self.threads, self.rates),
            *decode_promises(self.decoding, self.rates),
        ]

    def share_of_ideal(self, row: Row) -> float | None:
        """Return the ideal time over the measured one."""
        if row.timing is None:
            return None
        ideal = row.work.seconds(self.rates.limit(row.case.dtype), self.rates.bandwidth)
        return ideal / row.timing.median

    def over_portable(self, row: Row) -> float | None:
        """Return how many times as fast as the portable path a way is."""
        portable = next((x for x in self.rows if x.case is row.case and x.way == "portable"), None)
        if row.timing is None or portable is None or portable.timing is None:
            return None
        return portable.timing.median / row.timing.median

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "machine": self.machine._asdict(),
            "quick": self.quick,
            "rates": {
                "mm": {dtype_name(dtype): self.rates.mm(dtype) for dtype in self.rates.products},
                "bandwidth": self.rates.bandwidth,
            },
            "rows": [self._row(row) for row in self.rows],
            "budget": [{**promise._asdict(), "met": promise.met} for promise in self.promises],
            "decoding": [self._decoding(figure) for figure in self.decoding],
            "growth": [figure._asdict() for figure in self.growth],
            "threads": [figure._asdict() for figure in self.threads],
            "profiles": [profile._asdict() for profile in self.profiles],
        }

    def _decoding(self, figure: Decoding) -> dict[str, Any]:
        return {
            "model": figure.model,
            "format": figure.format,
            "rows": figure.rows,
            "ok": figure.ok,
            "error": figure.error,
            "seconds": figure.median,
            "slowest_hundredth": figure.tail,
            "tokens_per_second": figure.tokens_per_second,
            "bytes_per_token": figure.bytes_per_token,
            "share_of_ideal": figure.share(self.rates.bandwidth),
        }

    def _row(self, row: Row) -> dict[str, Any]:
        case, timing = row.case, row.timing
        return {
            "group": case.group,
            "case": case.name,
            "mode": case.mode,
            "dtype": dtype_name(case.dtype),
            "way": row.way,
            "note": row.note,
            "ok": row.ok,
            # JSON has no number for infinity.
            "error": "inf" if row.error == float("inf") else row.error,
            "why_not": row.why_not,
            "seconds": timing and timing.median,
            "quartiles": timing and [timing.low, timing.high],
            "runs": timing.runs if timing else 0,
            "tokens_per_second": row.tokens_per_second,
            "peak_bytes": row.peak if timing else None,
            "share_of_ideal": self.share_of_ideal(row),
            "over_portable": self.over_portable(row),
        }


def suite_cases(suite: Suite) -> Iterator[Case]:
    """List the cases of a suite in the order of its tables."""
    modes, narrow = suite.modes, torch.bfloat16
    if "core" in suite.groups:
        for groups in (24, 1):
            yield from core_cases(CoreSizes(g=groups), modes)
        if not suite.quick:
            yield from core_cases(CoreSizes(g=1), modes, narrow)
    if "scan" in suite.groups:
        yield from scan_cases(modes=modes)
        if not suite.quick:
            yield from scan_cases(modes=modes, dtype=narrow)
    if "conv" in suite.groups:
        yield from conv_cases(modes=modes)
    if "small" in suite.groups:
        for block in SMALL:
            yield from block_cases("small", block, modes)
    if "blocks" in suite.groups:
        for block in LARGE:
            if not suite.quick or block.name in QUICK_BLOCKS:
                yield from block_cases("blocks", block, modes)
    models = QUICK_MODELS if suite.quick else PUBLISHED
    if "prefill" in suite.groups and "forward" in modes:
        for name in models:
            for length in (64,) if suite.quick else (256, 2048):
                yield from prefill_cases(name, length)
    if "train" in suite.groups and "train" in modes:
        for name in models:
            yield from lm_cases(name, 64 if suite.quick else 256)


def run_suite(suite: Suite, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Measure everything a suite asks for.

    Args:
        suite: what to measure.
        tell: is told what happens.
    """
    tell("rates of the machine")
    cases = list(suite_cases(suite))
    dtypes = sorted({case.dtype for case in cases} | {torch.float32}, key=str)
    report = Report(machine=describe_machine(), rates=Rates(dtypes), quick=suite.quick)
    for group in dict.fromkeys(case.group for case in cases):
        for case in cases:
            if case.group == group:
                report.rows += measure(case, suite.effort, tell)
        report.rates.probe()
    if "decode" in suite.groups and "step" in suite.modes:
        report.decoding = decode_figures(
            QUICK_MODELS if suite.quick else PUBLISHED, tokens=20 if suite.quick else 60, tell=tell
        )
        report.rates.probe()
    modes = [mode for mode in suite.modes if mode != "step"]
    if "growth" in suite.groups:
        tell("time per token by length")
        lengths = (1024, 4096, 8192) if suite.quick else (1024, 4096, 16384, 65536)
        report.growth = growth_figures(lengths, modes)
        tell("threads")
        report.threads = thread_figures(2048, modes)
    if "profile" in suite.groups:
        tell("profile of the blocks")
        for block in LARGE:
            if not suite.quick or block.name in QUICK_BLOCKS:
                report.profiles += profile_block(block, modes)
    return report
