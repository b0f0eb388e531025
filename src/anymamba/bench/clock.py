"""Comparing the speed of functions: interleaved, so that a busy moment hurts all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping

__all__ = ["interleaved_medians"]


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
