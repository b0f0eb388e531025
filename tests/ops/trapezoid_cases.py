"""Inputs of the tests of the trapezoidal scan, and its implementations as functions."""

import torch

from anymamba.ops import (
    SsdPath,
    TrapezoidCoefficients,
    TrapezoidState,
    trapezoid_scan,
)
from kernels import NATIVE, is_native
from laws import rand, randn

KINDS = ["minimal", "serial", "serial_recalculated", *NATIVE]
PATHWAYS = ["single", "double"]


def scan_inputs(b=2, s=7, m=2, h=4, g=2, p=3, r=4, rows=None, dtype=torch.float64):
    """Return v, b, c, dt, da, lam and a random state: ssm, k, v."""
    rows = rows or b
    dt = rand(b, s, h, seed=4, low=0.05, dtype=dtype)
    return [
        randn(b, s, m, h, p, seed=1, dtype=dtype),
        randn(b, s, m, g, r, seed=2, dtype=dtype),
        randn(b, s, m, g, r, seed=3, dtype=dtype),
        dt,
        -dt * rand(b, s, h, seed=5, low=0.1, dtype=dtype),
        rand(b, s, h, seed=6, dtype=dtype),
        randn(rows, h, p, r, seed=7, dtype=dtype),
        randn(rows, m, g, r, seed=8, dtype=dtype),
        randn(rows, m, h, p, seed=9, dtype=dtype),
    ]


def scan(**options):
    """Return the scan as a function of the inputs: outputs, and the three tensors of the state."""

    def run(v, b, c, dt, da, lam, *state):
        coefficients = TrapezoidCoefficients(dt, da, lam)
        y, state = trapezoid_scan(v, b, c, coefficients, TrapezoidState(*state), **options)
        return (y, *state)

    return run


def how(kind, length):
    """Return the options that choose an implementation."""
    return {"impl": "native"} if is_native(kind) else {"path": SsdPath(kind, length)}
