"""Cross-entropy as an explicit formula, one row at a time. Judges the fast forms; slow."""

import torch
from torch import Tensor

from anymamba.ops.numerics import accumulate_dtype

__all__ = ["cross_entropy_reference"]


def cross_entropy_reference(logits_sw: Tensor, targets_s: Tensor) -> Tensor:
    """Return `log(sum exp(row)) - row[target]` of each row; 0 where the target is negative."""
    compute = accumulate_dtype(logits_sw.dtype)
    losses = []
    for row_w, target in zip(logits_sw.to(compute), targets_s.tolist(), strict=True):
        # The sum of no entry is 0 whatever the row holds, and has a gradient of 0.
        own = torch.logsumexp(row_w, 0) - row_w[target] if target >= 0 else row_w[:0].sum()
        losses.append(own)
    return torch.stack(losses) if losses else logits_sw.new_zeros(0, dtype=compute)
