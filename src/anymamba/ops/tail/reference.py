"""The tail as explicit formulas, one rank at a time. Judges the fast forms; slow."""

import torch
from torch import Tensor

from anymamba.ops.numerics import accumulate_dtype

__all__ = ["gated_product_reference", "gated_tail_reference"]


def gated_tail_reference(
    y_smv: Tensor,
    x_smv: Tensor,
    z_sv: Tensor,
    skip_v: Tensor,
    weight_v: Tensor | None,
    spread_mv: Tensor | None,
    merge_mv: Tensor | None,
    eps: float,
    group_size: int,
    before: bool,
) -> Tensor:
    """Add the skip, gate, normalise each group, and add up the ranks."""
    compute = accumulate_dtype(y_smv.dtype)
    out_sv = torch.zeros(z_sv.shape, dtype=compute, device=z_sv.device)
    for rank in range(y_smv.shape[1]):
        t_sv = y_smv[:, rank].to(compute) + skip_v.to(compute) * x_smv[:, rank].to(compute)
        inner_sv = z_sv.to(compute)
        if spread_mv is not None:
            inner_sv = inner_sv * spread_mv[rank].to(compute)
        gate_sv = inner_sv * torch.sigmoid(inner_sv)
        if weight_v is None:
            o_sv = t_sv * gate_sv
        elif before:
            o_sv = _norm(t_sv, weight_v.to(compute), eps, group_size) * gate_sv
        else:
            o_sv = _norm(t_sv * gate_sv, weight_v.to(compute), eps, group_size)
        out_sv = out_sv + (o_sv if merge_mv is None else o_sv * merge_mv[rank].to(compute))
    return out_sv.to(y_smv.dtype)


def gated_product_reference(value: Tensor, gate: Tensor) -> Tensor:
    """Multiply by `gate * sigmoid(gate)`."""
    compute = accumulate_dtype(value.dtype)
    wide = gate.to(compute)
    return (value.to(compute) * wide * torch.sigmoid(wide)).to(value.dtype)


def _norm(x_sv: Tensor, weight_v: Tensor, eps: float, group_size: int) -> Tensor:
    x_sgd = x_sv.unflatten(-1, (-1, group_size))
    root_sg1 = torch.sqrt(x_sgd.square().mean(dim=-1, keepdim=True) + eps)
    return (x_sgd / root_sg1).flatten(-2) * weight_v
