"""The Mamba-3 recurrence: coefficients, scan, step and fixed point. See README.md."""

from anymamba.ops.trapezoid.coefficients import (
    TrapezoidCoefficients,
    lookahead_scale,
    trapezoid_coefficients,
)
from anymamba.ops.trapezoid.fixed_point import trapezoid_fixed_point
from anymamba.ops.trapezoid.scan import (
    PATHWAYS,
    TrapezoidOutput,
    TrapezoidState,
    boundary_seed,
    same_step,
    trapezoid_scan,
    trapezoid_step,
)

__all__ = [
    "PATHWAYS",
    "TrapezoidCoefficients",
    "TrapezoidOutput",
    "TrapezoidState",
    "boundary_seed",
    "lookahead_scale",
    "same_step",
    "trapezoid_coefficients",
    "trapezoid_fixed_point",
    "trapezoid_scan",
    "trapezoid_step",
]
