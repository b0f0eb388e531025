"""Precision rules and the elementwise functions that several operators share."""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.errors import ConfigError, DtypeError

__all__ = [
    "A_ACTIVATIONS",
    "accumulate_dtype",
    "clamp_dt",
    "div_eps",
    "full_precision",
    "heavy_tail",
    "positive_decay",
    "softplus",
]

A_ACTIVATIONS = ("heavy_tail", "softplus")

# Smallest normal exponent of each dtype in the C convention (DBL_MIN_EXP and friends).
_MIN_EXPONENT = {
    torch.float64: -1021,
    torch.float32: -125,
    torch.bfloat16: -125,
    torch.float16: -13,
}


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of decays, sums, angles and states beside activations of `dtype`.

    Half types accumulate in float32; float32 and float64 accumulate in themselves.
    """
    if dtype not in _MIN_EXPONENT:
        raise DtypeError(f"activations must be float64, float32, bfloat16 or float16; got {dtype}.")
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """Switch autocast off for the tensor's device: autocast would narrow our matrix products."""
    device = tensor.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def div_eps(dtype: torch.dtype) -> float:
    """Return the smallest number that is safe to divide by, or to take a root of, in `dtype`.

    It lies (in exponents) between the rounding unit and the underflow limit.
    """
    accumulate_dtype(dtype)
    underflow = -((-_MIN_EXPONENT[dtype] * 2.3) ** 0.35)
    rounding = math.log10(torch.finfo(dtype).eps)
    return 10.0 ** ((underflow + rounding) / 2)


def heavy_tail(x: Tensor) -> Tensor:
    """Return `1 + x` for x >= 0 and `1 / (1 - x)` below: positive, smooth, with slope 1 at 0."""
    return torch.where(x >= 0, 1 + x, 1 / (1 - x.clamp(max=0)))


def positive_decay(x: Tensor, activation: str) -> Tensor:
    """Apply the activation that turns a projected number into |A| (see `A_ACTIVATIONS`)."""
    if activation == "heavy_tail":
        return heavy_tail(x)
    if activation == "softplus":
        return softplus(x)
    raise ConfigError(f"a_activation must be one of {A_ACTIVATIONS}; got {activation!r}.")


def softplus(x: Tensor) -> Tensor:
    """Softplus in the dtype of the argument; exact to rounding for float64 too.

    torch's softplus returns x itself above a threshold of 20, an error of 2e-9: fine in float32,
    visible in float64.
    """
    return F.softplus(x, threshold=40.0)


def clamp_dt(dt: Tensor, dt_limit: tuple[float, float] | None) -> Tensor:
    """Clamp step sizes to `(low, high)`; the limits (0, inf) and None change nothing."""
    if dt_limit is None or dt_limit == (0.0, math.inf):
        return dt
    low, high = dt_limit
    if not 0 <= low <= high:
        raise ConfigError(f"dt_limit must be (low, high) with 0 <= low <= high; got {dt_limit}.")
    return dt.clamp(low, high)
