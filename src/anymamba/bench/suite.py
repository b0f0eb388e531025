"""The whole bench: which cases there are, in which order, and how long they may take."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anymamba.bench.blocks import LARGE, SMALL, block_cases
from anymamba.bench.case import GROUPS, MODES, Case
from anymamba.bench.decode import decode_figures
from anymamba.bench.growth import growth_figures, thread_figures
from anymamba.bench.lms import PUBLISHED, lm_case
from anymamba.bench.machine import Rates, describe_machine
from anymamba.bench.measure import Effort, measure
from anymamba.bench.operators import conv_cases, core_cases, scan_cases
from anymamba.bench.portable import CoreSizes
from anymamba.bench.profile import profile_block
from anymamba.bench.results import Report
from anymamba.bench.training_memory import memory_figures
from anymamba.errors import ConfigError

__all__ = ["Suite", "run_suite", "suite_cases"]

# These take most of the time of a run, and the others measure the same code.
QUICK_BLOCKS = ("Mamba-2", "Mamba-3 SISO")
QUICK_MODELS = ("mamba2-130m",)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What to measure.

    Attributes:
        groups: which tables; all of them by default.
        modes: any of "forward", "train" and "step".
        quick: about a minute instead of half an hour: fewer runs, fewer blocks, one whole model and
            shorter sequences for it.
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
    def models(self) -> Sequence[str]:
        """Which whole models."""
        return QUICK_MODELS if self.quick else PUBLISHED

    @property
    def prompts(self) -> Sequence[int]:
        """Tokens that whole models read; the first number is what they train on."""
        return (64,) if self.quick else (256, 2048)

    @property
    def memory_lengths(self) -> tuple[int, int]:
        """Tokens of the training steps whose memory is measured."""
        return (64, 128) if self.quick else (256, 2048)

    @property
    def effort(self) -> Effort:
        """How long to measure a case."""
        if self.quick:
            return Effort(self.seconds or 0.2, least=2, most=10)
        return Effort(self.seconds or 1.0, least=3, most=50)


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
    if "prefill" in suite.groups and "forward" in modes:
        for name in suite.models:
            for dtype in (torch.float32, narrow):
                for length in suite.prompts:
                    yield lm_case(name, length, "forward", dtype=dtype)
    if "train" in suite.groups and "train" in modes:
        for name in suite.models:
            for dtype in (torch.float32, narrow):
                yield lm_case(name, suite.prompts[0], "train", dtype=dtype)


def run_suite(
    suite: Suite,
    tell: Callable[[str], None] = lambda _: None,
    show: Callable[[Report], None] = lambda _: None,
    keep: Callable[[str, Report, bool], None] = lambda group, found, is_complete: None,
) -> Report:
    """Measure everything a suite asks for.

    Args:
        suite: what to measure.
        tell: is told what happens.
        show: is given what was just measured, at once: a run of minutes should not be silent.
        keep: is given what there is of a group after each piece, and whether that is all of it: an
            interruption must not cost what was measured before.
    """
    tell("rates of the machine")
    cases = list(suite_cases(suite))
    dtypes = sorted({case.dtype for case in cases} | {torch.float32}, key=str)
    report = Report(machine=describe_machine(), rates=Rates(dtypes), quick=suite.quick)
    for group in suite.groups:
        for piece in _pieces(group, suite, cases, report, tell):
            report.add(piece)
            report.rates.probe()
            show(piece)
            keep(group, report.only(group), False)
        keep(group, report.only(group), True)
    return report


def _pieces(
    group: str, suite: Suite, cases: Sequence[Case], report: Report, tell: Callable[[str], None]
) -> Iterator[Report]:
    """Measure a group, piece by piece."""

    def piece(**found: Any) -> Report:
        return Report(machine=report.machine, rates=report.rates, quick=suite.quick, **found)

    for case in cases:
        if case.group == group:
            yield piece(rows=measure(case, suite.effort, tell))
    modes = [mode for mode in suite.modes if mode != "step"]
    if group == "memory" and "train" in modes:
        for figure in memory_figures(suite.models, suite.memory_lengths, tell=tell):
            yield piece(memory=[figure])
    if group == "decode" and "step" in suite.modes:
        # Enough for a slowest hundredth.
        tokens = 20 if suite.quick else 120
        for figures in decode_figures(suite.models, tokens=tokens, tell=tell):
            yield piece(decoding=figures)
    if group == "growth":
        tell("time per token by length")
        lengths = (1024, 4096, 8192) if suite.quick else (1024, 4096, 16384, 65536)
        yield piece(growth=growth_figures(lengths, modes))
        tell("threads")
        yield piece(threads=thread_figures(2048, modes))
    if group == "profile":
        tell("profile of the blocks")
        for block in LARGE:
            if not suite.quick or block.name in QUICK_BLOCKS:
                yield piece(profiles=profile_block(block, modes))
