"""The portable baseline: the fastest portable path at its best chunk length, found by trying."""

import functools
import math
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba import settings
from anymamba.bench.case import backward, without
from anymamba.ops import SsdPath, ssd_core

__all__ = ["CoreSizes", "core_inputs", "fastest_path", "fastest_paths", "in_dtype", "path_note"]

KINDS = ("minimal", "serial", "serial_recalculated")
CHUNKS = (32, 64, 128, 256)
SHORT = 512
# A path this much slower than the best one so far gets no second try.
HOPELESS = 1.25


class CoreSizes(NamedTuple):
    """The axes of the SSD core."""

    b: int = 1
    s: int = 2048
    m: int = 1
    h: int = 24
    g: int = 24
    p: int = 64
    r: int = 128

    @property
    def flops(self) -> float:
        """FLOP of a forward by the convention of l * m = 64, whatever chunk the code uses."""
        own, carried = 64 * (self.r + self.p), 4 * self.p * self.r
        return float(self.b * self.h * self.s * self.m * (own + carried))

    def input_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the inputs; decays and states are float32."""
        b, s, m, h, g, p, r = self
        return b * s * m * (h * p + 2 * g * r) * dtype.itemsize + 4 * b * h * (s + p * r)


def core_inputs(
    b: int = 1, s: int = 4096, m: int = 1, h: int = 24, g: int = 24, p: int = 64, r: int = 128
) -> list[Tensor]:
    """Return random inputs of the SSD core."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    return [
        normal(b, s, m, h, p),
        -0.1 * torch.rand((b, s, h), generator=random),
        normal(b, s, m, g, r),
        normal(b, s, m, g, r),
        normal(b, h, p, r),
    ]


def fastest_path(sizes: CoreSizes, mode: str, dtype: torch.dtype = torch.float32) -> SsdPath:
    """Return the path and chunk length with which the portable core is fastest at these sizes.

    Args:
        sizes: of the core.
        mode: "forward" or "train".
        dtype: of the activations.
    """
    found = fastest_paths(sizes, mode, dtype)
    return min(found, key=lambda path: found[path])


@functools.cache
def fastest_paths(
    sizes: CoreSizes, mode: str, dtype: torch.dtype = torch.float32
) -> dict[SsdPath, float]:
    """Return the best chunk length of each algorithm, as a path, and its seconds.

    Args:
        sizes: of the core.
        mode: "forward" or "train".
        dtype: of the activations.
    """
    # Which chunk is best shows on a few of them already; which algorithm, only at full length:
    # the products between chunks grow with the square of their number.
    short = sizes._replace(s=min(sizes.s, SHORT))
    # Rows of a chunk's matrices are l * m: longer chunks than the sequence are the same chunk.
    longest = 32 * math.ceil(short.s * sizes.m / 32)
    chunks = sorted({min(length, longest) for length in CHUNKS})
    with settings.override(native="off"):
        inputs = in_dtype(core_inputs(*short), dtype)
        best = [_best_chunk(kind, chunks, inputs, mode) for kind in KINDS]
        inputs = in_dtype(core_inputs(*sizes), dtype)
        return {path: _seconds(path, inputs, mode, runs=3) for path in best}


def _best_chunk(kind: str, chunks: Sequence[int], inputs: Sequence[Tensor], mode: str) -> SsdPath:
    tried: dict[SsdPath, float] = {}
    for path in (SsdPath(kind, length) for length in chunks):
        seconds = _seconds(path, inputs, mode, runs=1)
        if seconds <= HOPELESS * min(tried.values(), default=seconds):
            seconds = _seconds(path, inputs, mode, runs=3)
        tried[path] = seconds
    return min(tried, key=lambda path: tried[path])


def path_note(path: SsdPath | None) -> str:
    """Return a path in two words; nothing where there are no paths."""
    if path is None:
        return ""
    return f"{path.kind.replace('serial_recalculated', 'recalc.')} {path.chunk_len}"


def in_dtype(inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the core's inputs with activations of another dtype; coefficients stay as they are."""
    v_bsmhp, da_bsh, b_bsmgr, c_bsmgr, initial_bhpr = inputs
    return [v_bsmhp.to(dtype), da_bsh, b_bsmgr.to(dtype), c_bsmgr.to(dtype), initial_bhpr]


def _seconds(path: SsdPath, inputs: Sequence[Tensor], mode: str, runs: int) -> float:
    def forward(*tensors: Tensor) -> Sequence[Tensor]:
        return ssd_core(*tensors, path=path, impl="portable")

    run = backward(forward, inputs) if mode == "train" else without(lambda: forward(*inputs))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
