"""Comparing the speed of functions: interleaved, so that a busy moment hurts all of them alike."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

__all__ = ["Timing", "interleave", "interleaved_medians"]


class Timing(NamedTuple):
    """Seconds of a function over several runs: the median, and the middle half around it."""

    median: float
    low: float
    high: float
    runs: int

    @property
    def spread(self) -> float:
        """Half the width of the middle half, relative to the median."""
        return (self.high - self.low) / (2 * self.median) if self.median else 0.0


def interleaved_medians(
    functions: Mapping[str, Callable[[], object]], *, repeats: int = 5, warm_up: int = 1
) -> dict[str, float]:
    """Return the median seconds of each function, run in turns.

    Example:
        >>> sorted(interleaved_medians({"a": int, "b": str}, repeats=3))
        ['a', 'b']
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warm_up + repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn >= warm_up:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def interleave(
    functions: Mapping[str, Callable[[], object]],
    *,
    seconds: float = 1.0,
    least: int = 3,
    most: int = 50,
    turns: Mapping[str, int] | None = None,
    around: Mapping[str, Callable[[], AbstractContextManager[object]]] | None = None,
) -> dict[str, Timing]:
    """Time functions in turns: A, B, A, B, ...; one that has used up its time leaves the round.

    Args:
        functions: by name; already warm.
        seconds: what each of them may take altogether.
        least: runs that each of them gets in any case.
        most: runs after which it is enough.
        turns: how often some of them run, whatever the time.
        around: what is entered before a function's clock starts and left after it has stopped.

    Example:
        >>> interleave({"a": int, "b": str}, most=3)["a"].runs
        3
    """
    around, turns = around or {}, turns or {}
    times: dict[str, list[float]] = {name: [] for name in functions}
    waiting = dict(functions)
    with _no_collection():
        while waiting:
            for name, function in list(waiting.items()):
                with around.get(name, nullcontext)():
                    start = time.perf_counter()
                    result = function()
                    times[name].append(time.perf_counter() - start)
                    # Freed here: the next function's clock must not pay for this one's memory.
                    del result
                runs = len(times[name])
                is_enough = runs >= most or (runs >= least and sum(times[name]) >= seconds)
                if name in turns:
                    is_enough = runs >= turns[name]
                if is_enough:
                    del waiting[name]
    return {name: _timing(values) for name, values in times.items()}


def _timing(values: list[float]) -> Timing:
    middle = statistics.median(values)
    if len(values) < 2:
        return Timing(middle, middle, middle, len(values))
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(middle, low, high, len(values))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from running inside of somebody's measurement."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
