"""The machine: what it is, and the two rates that no code on it can exceed."""

import datetime
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.bench.words import dtype_name
from anymamba.ops import copy_to_large_pages, native_status
from anymamba.version import __version__

__all__ = [
    "Machine",
    "Rates",
    "Work",
    "array_to_read",
    "describe_machine",
    "free_bytes",
    "read_rate",
]

_READ_BYTES = 256 * 2**20
_MM_SIZES = (256, 512, 1024, 2048)
_MM_SECONDS = 0.4
# Where the machine does not say how much memory is free.
_USUAL_BYTES = 8 * 2**30


class Machine(NamedTuple):
    """What the figures were measured on."""

    cpu: str
    cores: int
    threads: int
    instructions: str
    kernels: str
    torch: str
    python: str
    anymamba: str
    system: str
    date: str

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {self.threads} threads, {self.instructions}; "
            f"CPU kernels: {self.kernels}; torch {self.torch}, anymamba {self.anymamba}, "
            f"Python {self.python}, {self.system}; {self.date}"
        )


def describe_machine() -> Machine:
    """Return what this process runs on.

    Example:
        >>> describe_machine().threads == torch.get_num_threads()
        True
    """
    status = native_status()
    return Machine(
        cpu=_cpu_name(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        kernels=status.variant or f"none ({status.why_not})",
        torch=torch.__version__,
        python=platform.python_version(),
        anymamba=__version__,
        system=f"{platform.system()} {platform.machine()}",
        date=datetime.date.today().isoformat(),
    )


def _cpu_name() -> str:
    table = Path("/proc/cpuinfo")
    if table.is_file():
        for line in table.read_text().splitlines():
            if match := re.match(r"model name\s*:\s*(.+)", line):
                return match[1]
    return platform.processor() or platform.machine()


def free_bytes() -> float:
    """Return how much memory the machine has left.

    Example:
        >>> free_bytes() > 0
        True
    """
    table = Path("/proc/meminfo")
    if table.is_file():
        for line in table.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return _USUAL_BYTES


class Work(NamedTuple):
    """Work that cannot be avoided: arithmetic, and bytes that have to be moved."""

    flops: float = 0.0
    moved: float = 0.0

    def seconds(self, mm: float, bandwidth: float) -> float:
        """Return the time at the machine's rates; arithmetic and traffic may overlap.

        Example:
            >>> Work(flops=8.0, moved=3.0).seconds(mm=4.0, bandwidth=1.0)
            3.0
        """
        return max(self.flops / mm, self.moved / bandwidth)


class Rates:
    """The rate of a large matrix product per dtype, and the bandwidth of reading a large array.

    Probed again and again while the cases run, because a machine is not equally fast all day; the
    rate is the median of the probes.

    Args:
        dtypes: whose matrix products are timed; float32 among them.
        read_bytes: of the array that is read; far beyond the caches.
    """

    def __init__(self, dtypes: Sequence[torch.dtype], read_bytes: int = _READ_BYTES) -> None:
        """Choose the sizes, and probe once."""
        self._sizes = {dtype: _product_size(dtype) for dtype in dtypes}
        self._array = array_to_read(read_bytes)
        self.products: dict[torch.dtype, list[float]] = {dtype: [] for dtype in dtypes}
        self.reads: list[float] = []
        self.probe()

    def probe(self) -> None:
        """Measure both rates once more."""
        for dtype, size in self._sizes.items():
            self.products[dtype].append(_product_rate(dtype, size))
        self.reads.append(read_rate(self._array))

    def mm(self, dtype: torch.dtype) -> float:
        """Return the FLOP per second of a large matrix product."""
        return statistics.median(self.products[dtype])

    def limit(self, dtype: torch.dtype) -> float:
        """Return the rate that no code in this dtype can exceed.

        Where a half type is emulated its product is slower than float32's, but code may widen.
        """
        return max(self.mm(dtype), self.mm(torch.float32))

    def to_dict(self) -> dict[str, Any]:
        """Return the rates as plain values."""
        products = {dtype_name(dtype): self.mm(dtype) for dtype in self.products}
        return {"mm": products, "bandwidth": self.bandwidth}

    @property
    def bandwidth(self) -> float:
        """The bytes per second of reading a large array."""
        return statistics.median(self.reads)


def array_to_read(read_bytes: int = _READ_BYTES) -> Tensor:
    """Return an array for `read_rate`, which is far beyond the caches unless told otherwise.

    In the same pages as the weights of a loaded model: the limit is the memory at its best.
    """
    return copy_to_large_pages(torch.ones(()).expand(read_bytes // 4))


def read_rate(array: Tensor) -> float:
    """Return the bytes per second of reading an array: the best of a few readings.

    Args:
        array: float32; what `array_to_read` returned.
    """
    # Which reduction comes closest to the memory's own rate differs between builds of torch.
    readers: list[Callable[[], object]] = [array.norm, array.view(torch.int64).sum]
    return array.nbytes / min(_best(reader) for reader in readers)


def _product_size(dtype: torch.dtype) -> int:
    """Return the largest size that does not take too long: some dtypes are very slow somewhere."""
    fitting = _MM_SIZES[0]
    for size in _MM_SIZES[1:]:
        if 2 * size**3 / _product_rate(dtype, fitting) > _MM_SECONDS:
            break
        fitting = size
    return fitting


def _product_rate(dtype: torch.dtype, size: int) -> float:
    left = torch.ones(size, size, dtype=dtype)
    out = torch.empty_like(left)
    return 2 * size**3 / _best(lambda: torch.mm(left, left, out=out))


def _best(function: Callable[[], object], runs: int = 3) -> float:
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
