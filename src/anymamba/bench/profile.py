"""Where a block's time goes: torch's operators, ours, and what is left beside them."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from anymamba.bench.blocks import BlockCase, block_cases
from anymamba.bench.case import Way
from anymamba.bench.memory import quiet_profiler
from anymamba.errors import BackendError

__all__ = ["Profile", "profile_block"]

TOP = 8


class Profile(NamedTuple):
    """Shares of a run's time by operator, largest first."""

    name: str
    mode: str
    way: str
    seconds: float
    shares: dict[str, float]


def profile_block(block: BlockCase, modes: Sequence[str] = ("forward", "train")) -> list[Profile]:
    """Run a block once per mode under torch's profiler.

    Args:
        block: what is built, and for which input.
        modes: any of "forward" and "train".
    """
    found = []
    for case in block_cases("profile", block, modes):
        ways = case.prepare()(case.length)
        for name in ("native", "portable"):
            way = ways[name]
            if isinstance(way, Way) and (profile := _profile(case.name, case.mode, name, way)):
                found.append(profile)
                break
    return found


def _profile(name: str, mode: str, column: str, way: Way) -> Profile | None:
    with way.around():
        try:
            way.run()
        except BackendError:
            return None
        with quiet_profiler() as profile:
            seconds = _seconds(way.run)
    spent: dict[str, float] = {}
    for event in profile.key_averages():
        key = (
            str(event.key)
            .removeprefix("aten::")
            .removeprefix("autograd::engine::evaluate_function: ")
        )
        spent[key] = spent.get(key, 0.0) + event.self_cpu_time_total / 1e6
    top = dict(sorted(spent.items(), key=lambda entry: -entry[1])[:TOP])
    shares = {key: value / seconds for key, value in top.items()}
    shares["the rest"] = max(0.0, 1 - sum(shares.values()))
    return Profile(name, mode, column, seconds, shares)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
