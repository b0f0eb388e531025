"""The norms as explicit formulas, one group at a time. Judges the fast forms; slow."""

import torch
from torch import Tensor

from anymamba.ops.numerics import accumulate_dtype

__all__ = ["gated_rms_norm_reference", "layer_norm_reference", "rms_norm_reference"]


def rms_norm_reference(
    x: Tensor, weight: Tensor, *, eps: float = 1e-5, group_size: int | None = None
) -> Tensor:
    """Divide each group of the last axis by its root mean square, then weigh it."""
    compute = accumulate_dtype(x.dtype)
    size = group_size or x.shape[-1]
    groups = []
    for start in range(0, x.shape[-1], size):
        part = x[..., start : start + size].to(compute)
        root = torch.sqrt((part * part).sum(dim=-1, keepdim=True) / size + eps)
        groups.append(part / root * weight[start : start + size].to(compute))
    return torch.cat(groups, dim=-1).to(x.dtype)


def gated_rms_norm_reference(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool,
) -> Tensor:
    """Gate with `z * sigmoid(z)`, after or before the norm."""
    compute = accumulate_dtype(x.dtype)
    gate = z.to(compute) * torch.sigmoid(z.to(compute))
    if norm_before_gate:
        y = rms_norm_reference(x.to(compute), weight, eps=eps, group_size=group_size) * gate
    else:
        y = rms_norm_reference(x.to(compute) * gate, weight, eps=eps, group_size=group_size)
    return y.to(x.dtype)


def layer_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float = 1e-5
) -> Tensor:
    """Subtract the mean of the last axis, divide by its standard deviation, weigh and shift."""
    compute = accumulate_dtype(x.dtype)
    wide = x.to(compute)
    centred = wide - wide.mean(dim=-1, keepdim=True)
    y = centred / torch.sqrt((centred * centred).mean(dim=-1, keepdim=True) + eps)
    y = y * weight.to(compute)
    return (y if bias is None else y + bias.to(compute)).to(x.dtype)
