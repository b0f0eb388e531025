"""Step sizes from their definition (README 2)."""

import torch
from torch import Tensor

from anymamba.ops.numerics import accumulate_dtype

__all__ = ["step_size_reference"]


def step_size_reference(x_sv: Tensor, bias_v: Tensor) -> Tensor:
    """Return log(1 + exp(x + bias)) in the dtype that step sizes have beside x."""
    compute = accumulate_dtype(x_sv.dtype)
    y_sv = x_sv.to(compute) + bias_v.to(compute)
    return torch.logaddexp(y_sv, torch.zeros_like(y_sv))
