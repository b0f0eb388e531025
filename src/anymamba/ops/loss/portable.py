"""Cross-entropy of rows in plain torch (README 2 and 4)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.ops.loss.targets import IGNORE
from anymamba.ops.numerics import accumulate_dtype

__all__ = ["backward", "composite", "forward", "loss_and_gradient_"]


def forward(logits_sw: Tensor, targets_s: Tensor) -> tuple[Tensor]:
    """Return the loss of each row; 0 where it does not count."""
    return composite(logits_sw, targets_s)


def composite(logits_sw: Tensor, targets_s: Tensor) -> tuple[Tensor]:
    """Return the same from a differentiable function."""
    wide_sw = logits_sw.to(accumulate_dtype(logits_sw.dtype))
    return (F.cross_entropy(wide_sw, targets_s, ignore_index=IGNORE, reduction="none"),)


def backward(grad_s: Tensor, logits_sw: Tensor, targets_s: Tensor) -> tuple[Tensor]:
    """Return the gradient of the logits: (softmax - one-hot) times the gradient of the row."""
    grad_sw = logits_sw.to(accumulate_dtype(logits_sw.dtype), copy=True)
    loss_and_gradient_(grad_sw, targets_s)
    return (grad_sw.mul_(grad_s.to(grad_sw.dtype).unsqueeze(1)).to(logits_sw.dtype),)


def loss_and_gradient_(logits_sw: Tensor, targets_s: Tensor) -> Tensor:
    """Return the loss of each row, and leave its gradient where the logits were."""
    counts_s = targets_s != IGNORE
    place_s1 = targets_s.clamp(min=0).unsqueeze(1)
    compute = accumulate_dtype(logits_sw.dtype)
    wide_sw = logits_sw if logits_sw.dtype == compute else logits_sw.to(compute)
    wide_sw.sub_(wide_sw.amax(dim=1, keepdim=True))
    own_s1 = wide_sw.gather(1, place_s1)
    total_s1 = wide_sw.exp_().sum(dim=1, keepdim=True)
    loss_s = (total_s1.log() - own_s1).squeeze(1)
    wide_sw.div_(total_s1)
    wide_sw.scatter_(1, place_s1, torch.expm1(-loss_s).unsqueeze(1))
    wide_sw.masked_fill_(~counts_s.unsqueeze(1), 0)
    if wide_sw is not logits_sw:
        logits_sw.copy_(wide_sw)
    return loss_s.masked_fill(~counts_s, 0)
