"""Measuring a case: through the gate, then memory, then the clock."""

from collections.abc import Callable
from typing import NamedTuple

from anymamba.bench.case import Case, Way, Ways, candidates
from anymamba.bench.clock import Timing, interleave
from anymamba.bench.gate import Verdict, judge
from anymamba.bench.machine import Work
from anymamba.bench.memory import peak_and_result, tensor_bytes

__all__ = ["Effort", "Row", "measure"]


class Effort(NamedTuple):
    """How long to measure.

    Attributes:
        seconds: for each way of a case.
        least: runs in any case, unless a way says how many.
        most: runs after which it is enough.
    """

    seconds: float = 1.0
    least: int = 5
    most: int = 50


class Row(NamedTuple):
    """One way of one case, measured; or why it was not.

    Attributes:
        case: what was computed.
        way: the column.
        note: which algorithm, where there are several.
        error: distance from the reference at the gate; None when it did not run.
        limit: of that distance.
        ok: whether it agreed with the reference, or honestly did not run.
        why_not: why there is no time.
        timing: seconds; None without one.
        peak: most bytes allocated at once, beyond weights and inputs; 0 where nobody can tell.
        results: bytes of outputs and gradients, which are part of the peak.
    """

    case: Case
    way: str
    note: str = ""
    error: float | None = None
    limit: float | None = None
    ok: bool = True
    why_not: str | None = None
    timing: Timing | None = None
    peak: int = 0
    results: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens over the median time."""
        return self.case.tokens / self.timing.median if self.timing else None

    @property
    def intermediates(self) -> int:
        """Peak without outputs and gradients."""
        return self.peak - self.results

    @property
    def work(self) -> Work:
        """What cannot be avoided."""
        return self.case.work


def measure(case: Case, effort: Effort, tell: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Measure every way of a case; one that disagrees with the reference gets no time.

    Args:
        case: what to compute.
        effort: how long to measure.
        tell: is told what happens.
    """
    tell(f"{case.title}: gate")
    ways_at = case.prepare()
    verdicts = judge(case, ways_at(case.gate_length))
    tell(f"{case.title}: memory")
    ways = candidates(ways_at(case.length))
    ready = {
        name: way
        for name, way in ways.items()
        if isinstance(way, Way) and verdicts[name].error is not None and verdicts[name].ok
    }
    held = {name: _memory(way) for name, way in ready.items()}
    tell(f"{case.title}: clock")
    timings = _time(ready, effort)
    return [_row(case, name, ways, verdicts, timings, held) for name in ways]


def _memory(way: Way) -> tuple[int, int]:
    """Return peak and bytes of the results; this also warms the way up."""
    if not way.weighed:
        return 0, 0
    with way.around():
        if not way.turns:
            way.run()
        peak, results = peak_and_result(way.run)
    held = tensor_bytes(results)
    return (0, held) if way.outside else (peak, held)


def _time(ways: dict[str, Way], effort: Effort) -> dict[str, Timing]:
    return interleave(
        {name: way.run for name, way in ways.items()},
        seconds=effort.seconds,
        least=effort.least,
        most=effort.most,
        turns={name: way.turns for name, way in ways.items() if way.turns},
        around={name: way.around for name, way in ways.items()},
    )


def _row(
    case: Case,
    name: str,
    ways: Ways,
    verdicts: dict[str, Verdict],
    timings: dict[str, Timing],
    held: dict[str, tuple[int, int]],
) -> Row:
    verdict, way = verdicts[name], ways[name]
    note = way.note if isinstance(way, Way) else ""
    # A way may pass the gate and still be absent at full length.
    why_not = way if isinstance(way, str) else verdict.why_not
    if not verdict.ok:
        why_not = (
            f"differs from the reference by {verdict.error:.1e} of the largest value "
            f"(limit {verdict.limit:.0e}), so its speed means nothing"
        )
    peak, results = held.get(name, (0, 0))
    return Row(
        case=case,
        way=name,
        note=note,
        error=verdict.error,
        limit=verdict.limit,
        ok=verdict.ok,
        why_not=why_not,
        timing=timings.get(name),
        peak=peak,
        results=results,
    )
