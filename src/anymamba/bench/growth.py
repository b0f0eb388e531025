"""How time grows with the length of the sequence, and what a second thread brings."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.bench.case import backward, without
from anymamba.bench.clock import interleave
from anymamba.bench.portable import core_inputs
from anymamba.bench.scans import scan_inputs
from anymamba.errors import BackendError
from anymamba.ops import selective_scan, ssd_core

__all__ = ["Growth", "Threads", "growth_figures", "thread_figures"]

Run = Callable[[], Sequence[Tensor]]


class Growth(NamedTuple):
    """Seconds per token at each length."""

    name: str
    mode: str
    impl: str
    per_token: dict[int, float]

    @property
    def deviation(self) -> float:
        """How far the lengths lie from the middle between the fastest and the slowest.

        Example:
            >>> round(Growth("", "", "", {1: 0.9, 2: 1.1, 4: 1.0}).deviation, 3)
            0.1
        """
        low, high = min(self.per_token.values()), max(self.per_token.values())
        return (high - low) / (high + low)


class Threads(NamedTuple):
    """Seconds by number of threads, and those of a large matrix product in the same turns.

    The product says what a second thread brings on this machine at this moment: the cores of a
    rented machine share their clock and their multipliers with others.
    """

    name: str
    mode: str
    impl: str
    seconds: dict[int, float]
    mm_seconds: dict[int, float]

    @property
    def speedup(self) -> float:
        """One thread's time over that of the most threads."""
        return _gain(self.seconds)

    @property
    def mm_speedup(self) -> float:
        """The same of the matrix product.

        Example:
            >>> Threads("", "", "", {1: 3.0, 2: 2.0}, {1: 3.2, 2: 2.0}).mm_speedup
            1.6
        """
        return _gain(self.mm_seconds)


def _gain(seconds: dict[int, float]) -> float:
    return seconds[1] / seconds[max(seconds)]


def growth_figures(
    lengths: Sequence[int], modes: Sequence[str] = ("forward", "train"), **sizes: int
) -> list[Growth]:
    """Measure seconds per token of SSD core (one group) and selective scan at several lengths.

    Every run returns new tensors, as a user's does. Where freed memory is kept
    (`keep_freed_memory`, as in `anymamba bench`) it is found again at every length; else those
    above 32 MB are mapped anew, and filling their pages for the first time is part of the time.

    Args:
        lengths: of the sequences.
        modes: any of "forward" and "train".
        **sizes: h, p, r of the core and i of the scan, for a smaller measurement.
    """
    found = []
    for name, make in _operators(**sizes).items():
        for mode in modes:
            runs, impl = {}, ""
            for length in lengths:
                runs[str(length)], impl = make(length, mode)
            for run in runs.values():
                run()
            timings = interleave(runs, seconds=0.5, least=5, most=15)
            per_token = {length: timings[str(length)].median / length for length in lengths}
            found.append(Growth(name, mode, impl, per_token))
            del runs
    return found


def thread_figures(
    length: int, modes: Sequence[str] = ("forward", "train"), *, mm_size: int = 1024, **sizes: int
) -> list[Threads]:
    """Measure SSD core (one group) and selective scan on one thread and on all of them.

    Args:
        length: of the sequence.
        modes: any of "forward" and "train".
        mm_size: rows of the matrices whose product runs in turns with them.
        **sizes: as in `growth_figures`.

    Returns:
        Nothing when there is one thread only.
    """
    most = torch.get_num_threads()
    found: list[Threads] = []
    if most == 1:
        return found
    square = torch.ones(mm_size, mm_size)
    for name, make in _operators(**sizes).items():
        for mode in modes:
            run, impl = make(length, mode)
            runs = {"operator": run, "mm": lambda: square @ square}
            seconds = _by_threads(runs, (1, most))
            found.append(Threads(name, mode, impl, seconds["operator"], seconds["mm"]))
    return found


def _by_threads(
    runs: dict[str, Callable[[], object]], counts: Sequence[int]
) -> dict[str, dict[int, float]]:
    functions, around = {}, {}
    for name, run in runs.items():
        run()
        for count in counts:
            functions[f"{name} {count}"] = run
            around[f"{name} {count}"] = functools.partial(_threads, count)
    timings = interleave(functions, seconds=1.0, least=5, around=around)
    return {name: {n: timings[f"{name} {n}"].median for n in counts} for name in runs}


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _operators(
    h: int = 24, p: int = 64, r: int = 128, i: int = 1536
) -> dict[str, Callable[[int, str], tuple[Run, str]]]:
    def core(length: int, mode: str) -> tuple[Run, str]:
        inputs = core_inputs(s=length, h=h, g=1, p=p, r=r)
        return _with_best(lambda impl: lambda *x: ssd_core(*x, impl=impl), inputs, mode)

    def scan(length: int, mode: str) -> tuple[Run, str]:
        inputs = scan_inputs(length, i, 16)
        return _with_best(lambda impl: lambda *x: selective_scan(*x, impl=impl), inputs, mode)

    return {f"SSD core h{h} p{p} r{r} g1": core, f"selective scan d{i} r16": scan}


def _with_best(
    function: Callable[[str], Callable[..., Sequence[Tensor]]], inputs: list[Tensor], mode: str
) -> tuple[Run, str]:
    """Return what a user would run: the kernel where it serves, else the portable code."""
    impl = "native"
    try:
        with torch.no_grad():
            function(impl)(*_shortened(inputs))
    except BackendError:
        impl = "portable"
    run = function(impl)
    if mode == "train":
        return backward(run, inputs), impl
    return without(lambda: run(*inputs)), impl


def _shortened(inputs: list[Tensor]) -> list[Tensor]:
    """Return the inputs with one token; what has no time axis stays."""
    length = inputs[0].shape[1]
    return [x[:, :1] if x.dim() > 2 and x.shape[1] == length else x for x in inputs]
