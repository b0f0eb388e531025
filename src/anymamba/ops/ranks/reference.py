"""Values of ranks from their definition (README 2)."""

import torch
from torch import Tensor

from anymamba.ops.numerics import accumulate_dtype

__all__ = ["rank_values_reference"]


def rank_values_reference(x_sv: Tensor, weight_mv: Tensor) -> Tensor:
    """Return one row per rank, in the dtype of x."""
    compute = accumulate_dtype(x_sv.dtype)
    wide_sv = x_sv.to(compute)
    ranks = [wide_sv * weight_v.to(compute) for weight_v in weight_mv]
    return torch.stack(ranks, dim=1).to(x_sv.dtype)
