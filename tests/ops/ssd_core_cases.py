"""Inputs of the tests of the SSD core, and its implementations as functions."""

import torch

from anymamba.ops import SsdPath, ssd_core
from kernels import NATIVE, is_native
from laws import rand, randn

ALGORITHMS = ["minimal", "serial", "serial_recalculated"]
KINDS = [*ALGORITHMS, *NATIVE]
# No weights, none but own = 0, or both.
WEIGHTS = ["none", "strict", "both"]


def core_inputs(b=2, s=7, m=1, h=2, g=1, p=3, r=4, rows=None, dtype=torch.float64, decay=1.0):
    """Random inputs of the core, weights last; `rows` states, one per batch row unless packed."""
    return [
        randn(b, s, m, h, p, seed=1, dtype=dtype),
        -decay * rand(b, s, h, seed=2, dtype=dtype),
        randn(b, s, m, g, r, seed=3, dtype=dtype),
        randn(b, s, m, g, r, seed=4, dtype=dtype),
        randn(rows or b, h, p, r, seed=5, dtype=dtype),
        randn(b, s, h, seed=6, dtype=dtype),
        randn(b, s, h, seed=7, dtype=dtype),
    ]


def weighed(inputs, weights):
    """Return the arguments of a call with the weights that are asked for."""
    return inputs if weights == "both" else inputs[:5]


def reference(strict=False, cu_seqlens=None):
    """Return the loop over time as a function of the inputs."""
    return lambda *x: ssd_core(*x, strict=strict, impl="reference", cu_seqlens=cu_seqlens)


def by(kind, length=None, strict=False, cu_seqlens=None):
    """Return one implementation as a function of the inputs."""
    if is_native(kind):
        return lambda *x: ssd_core(*x, strict=strict, impl="native", cu_seqlens=cu_seqlens)
    path = SsdPath(kind, length)
    return lambda *x: ssd_core(*x, strict=strict, path=path, cu_seqlens=cu_seqlens)
