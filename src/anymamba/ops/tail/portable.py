"""The tail in plain torch, from functions that autograd differentiates (README 3)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.ops.norm import gated_rms_norm
from anymamba.ops.numerics import accumulate_dtype

__all__ = ["product", "product_backward", "tail", "tail_backward"]


def tail(
    y_smv: Tensor,
    x_smv: Tensor,
    z_sv: Tensor,
    skip_v: Tensor,
    weight_v: Tensor,
    spread_mv: Tensor,
    merge_mv: Tensor,
    eps: float,
    group_size: int,
    order: str,
    ranked: bool,
) -> tuple[Tensor]:
    """Compute the tail of rows; arguments as in `schema`."""
    dtype, compute = y_smv.dtype, accumulate_dtype(y_smv.dtype)
    t_smv = torch.addcmul(y_smv.to(compute), skip_v.to(compute), x_smv.to(compute))
    gate_smv = z_sv.unsqueeze(1)
    if ranked:
        gate_smv = (gate_smv * spread_mv).to(dtype)
    if order == "none":
        o_smv = t_smv * F.silu(gate_smv.to(compute))
    else:
        o_smv = gated_rms_norm(
            t_smv.to(dtype),
            gate_smv,
            weight_v,
            eps=eps,
            group_size=group_size,
            norm_before_gate=order == "before",
            impl="portable",
        )
    o_sv = (o_smv * merge_mv.to(compute)).sum(1) if ranked else o_smv.squeeze(1)
    return (o_sv.to(dtype),)


def tail_backward(
    grad_sv: Tensor,
    y_smv: Tensor,
    x_smv: Tensor,
    z_sv: Tensor,
    skip_v: Tensor,
    weight_v: Tensor,
    spread_mv: Tensor,
    merge_mv: Tensor,
    eps: float,
    group_size: int,
    order: str,
    ranked: bool,
) -> tuple[Tensor, ...]:
    """Compute the gradients of the tensors (README 4)."""
    tensors = (y_smv, x_smv, z_sv, skip_v, weight_v, spread_mv, merge_mv)
    compute = accumulate_dtype(y_smv.dtype)
    y, x, z, skip, weight, spread, merge = (tensor.to(compute) for tensor in tensors)
    t_smv = torch.addcmul(y, skip, x)
    z_s1v = z.unsqueeze(1)
    q_smv = z_s1v * spread if ranked else z_s1v
    gate_smv = F.silu(q_smv)
    grad_s1v = grad_sv.to(compute).unsqueeze(1)
    grad_o_smv = grad_s1v * merge if ranked else grad_s1v
    grad_weight = torch.zeros_like(weight)
    if order == "none":
        o_smv = t_smv * gate_smv
        grad_t_smv, grad_gate_smv = grad_o_smv * gate_smv, grad_o_smv * t_smv
    elif order == "before":
        unit_smv, scale_smv = _normed(t_smv, eps, group_size)
        o_smv = unit_smv * weight * gate_smv
        inner_smv = grad_o_smv * gate_smv
        grad_weight = (inner_smv * unit_smv).sum((0, 1))
        grad_t_smv = _pull(inner_smv * weight, unit_smv, scale_smv, group_size)
        grad_gate_smv = grad_o_smv * unit_smv * weight
    else:
        unit_smv, scale_smv = _normed(t_smv * gate_smv, eps, group_size)
        o_smv = unit_smv * weight
        grad_weight = (grad_o_smv * unit_smv).sum((0, 1))
        grad_u_smv = _pull(grad_o_smv * weight, unit_smv, scale_smv, group_size)
        grad_t_smv, grad_gate_smv = grad_u_smv * gate_smv, grad_u_smv * t_smv
    grad_q_smv = torch.ops.aten.silu_backward(grad_gate_smv, q_smv.expand_as(grad_gate_smv))
    grads = (
        grad_t_smv,
        grad_t_smv * skip,
        (grad_q_smv * spread if ranked else grad_q_smv).sum(1),
        (grad_t_smv * x).sum((0, 1)),
        grad_weight,
        (grad_q_smv * z_s1v).sum(0) if ranked else torch.zeros_like(spread),
        (grad_s1v * o_smv).sum(0) if ranked else torch.zeros_like(merge),
    )
    pairs = zip(grads, tensors, strict=True)
    return tuple(grad.to(tensor.dtype).contiguous() for grad, tensor in pairs)


def _normed(x_smv: Tensor, eps: float, group_size: int) -> tuple[Tensor, Tensor]:
    """Return groups divided by their root mean square, and the factors, spread over the groups."""
    x_smgd = x_smv.unflatten(-1, (-1, group_size))
    scale_smg1 = torch.rsqrt(x_smgd.square().mean(dim=-1, keepdim=True) + eps)
    scale_smv = scale_smg1.expand_as(x_smgd).flatten(-2)
    return x_smv * scale_smv, scale_smv


def _pull(grad_smv: Tensor, unit_smv: Tensor, scale_smv: Tensor, group_size: int) -> Tensor:
    """Return the gradient before the division by the root mean square."""
    product_smgd = (grad_smv * unit_smv).unflatten(-1, (-1, group_size))
    mean_smv = product_smgd.mean(dim=-1, keepdim=True).expand_as(product_smgd).flatten(-2)
    return (grad_smv - unit_smv * mean_smv) * scale_smv


def product(value_sv: Tensor, gate_sv: Tensor) -> tuple[Tensor]:
    """Compute `value * silu(gate)`."""
    return (value_sv * F.silu(gate_sv),)


def product_backward(grad_sv: Tensor, value_sv: Tensor, gate_sv: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of value and gate."""
    grad_gate_sv = torch.ops.aten.silu_backward(grad_sv * value_sv, gate_sv)
    return (grad_sv * F.silu(gate_sv)).contiguous(), grad_gate_sv.contiguous()
