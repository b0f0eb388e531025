"""From projected numbers to the coefficients of the exponential-trapezoid recurrence."""

from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.errors import ConfigError, ShapeError
from anymamba.ops.checks import check_one_precision, guard
from anymamba.ops.numerics import clamp_dt, positive_decay, softplus
from anymamba.ops.packing import Packing

__all__ = ["TrapezoidCoefficients", "lookahead_scale", "trapezoid_coefficients"]


class TrapezoidCoefficients(NamedTuple):
    """Step size, log-decay and mixing weight of each token and head, (..., h).

    The recurrence reads `H[t] = alpha H[t-1] + beta (previous outer product) + gamma (own)`.
    """

    dt: Tensor
    da: Tensor
    lam: Tensor

    @property
    def gamma(self) -> Tensor:
        """Weight of a token's own contribution: lam * dt."""
        return self.lam * self.dt

    @property
    def pending(self) -> Tensor:
        """Weight of the previous token before this token's decay: (1 - lam) * dt."""
        return (1 - self.lam) * self.dt

    @property
    def beta(self) -> Tensor:
        """Weight of the previous token's contribution: (1 - lam) * dt * alpha."""
        return self.pending * self.da.exp()


def trapezoid_coefficients(
    raw_dt: Tensor,
    raw_a: Tensor,
    raw_lam: Tensor,
    dt_bias_h: Tensor,
    *,
    a_activation: str = "heavy_tail",
    a_floor: float = 1e-4,
    dt_limit: tuple[float, float] | None = None,
) -> TrapezoidCoefficients:
    """Turn projections into coefficients.

        dt = clamp(softplus(raw_dt + dt_bias))        lam = sigmoid(raw_lam)
        A  = -max(activation(raw_a), a_floor)         da = dt * A

    The floor acts on the positive value, before the sign: the other order would pin A to a
    constant.

    Args:
        raw_dt: projected step sizes; (..., h).
        raw_a: projected decay rates; (..., h).
        raw_lam: projected mixing weights; (..., h).
        dt_bias_h: bias of the step size.
        a_activation: "heavy_tail" or "softplus".
        a_floor: smallest |A|; positive.
        dt_limit: (low, high) clamp of dt after softplus.

    Example:
        >>> zero = torch.zeros(1)
        >>> [float(x) for x in trapezoid_coefficients(zero, zero, zero, zero)][1:]
        [-0.6931471824645996, 0.5]
    """
    where = "trapezoid_coefficients"
    if a_floor <= 0:
        raise ConfigError(f"{where}: a_floor must be positive; got {a_floor}.")
    compute = check_one_precision(
        where, raw_dt=raw_dt, raw_a=raw_a, raw_lam=raw_lam, dt_bias_h=dt_bias_h
    )
    if not raw_dt.shape == raw_a.shape == raw_lam.shape or dt_bias_h.shape != raw_dt.shape[-1:]:
        raise ShapeError(
            f"{where}: raw_dt, raw_a and raw_lam must have one shape (..., h) and dt_bias_h (h,); "
            f"got {tuple(raw_dt.shape)}, {tuple(raw_a.shape)}, {tuple(raw_lam.shape)} and "
            f"{tuple(dt_bias_h.shape)}."
        )
    guard(where, raw_dt=raw_dt, raw_a=raw_a, raw_lam=raw_lam, dt_bias_h=dt_bias_h)
    dt = clamp_dt(softplus(raw_dt.to(compute) + dt_bias_h.to(compute)), dt_limit)
    decay = positive_decay(raw_a.to(compute), a_activation).clamp(min=a_floor)
    return TrapezoidCoefficients(dt, -dt * decay, raw_lam.to(compute).sigmoid())


def lookahead_scale(coefficients: TrapezoidCoefficients, pack: Packing | None = None) -> Tensor:
    """Return gamma[t] + (1 - lam[t+1]) dt[t+1], the weight of a token in the one-pass scan.

    The look-ahead is zero at the last token of each sequence: what follows is not known yet, and
    the next call adds it through the boundary seed.
    """
    pending_bsh = coefficients.pending
    ahead_bsh = torch.cat([pending_bsh[:, 1:], torch.zeros_like(pending_bsh[:, :1])], 1)
    if pack is not None:
        ahead_bsh = torch.where(pack.is_last_s[:, None], 0, ahead_bsh)
    return coefficients.gamma + ahead_bsh
