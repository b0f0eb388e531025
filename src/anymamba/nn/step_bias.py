"""The first biases of step sizes."""

import math
from typing import Any

import torch
from torch import Tensor

from anymamba.errors import ConfigError

__all__ = ["InverseSoftplus"]


class InverseSoftplus:
    """Initialisation of step-size biases: softplus(bias) is log-uniform in [dt_min, dt_max]."""

    def __init__(self, dt_min: float, dt_max: float, dt_init_floor: float) -> None:
        """Check the range."""
        if not 0 < dt_min <= dt_max:
            raise ConfigError(
                f"dt_min and dt_max must satisfy 0 < dt_min <= dt_max; got {dt_min}, {dt_max}."
            )
        self.low, self.high, self.floor = math.log(dt_min), math.log(dt_max), dt_init_floor

    def __call__(self, size: int, device: Any, dtype: Any) -> Tensor:
        """Return `size` fresh biases."""
        uniform = torch.rand(size, device=device, dtype=torch.float32)
        dt = (uniform * (self.high - self.low) + self.low).exp().clamp(min=self.floor)
        return (dt + torch.log(-torch.expm1(-dt))).to(dtype)
