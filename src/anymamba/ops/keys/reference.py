"""Keys and queries by their definition: norms as formulas, rotations token by token. The judge."""

import torch
from torch import Tensor

from anymamba.ops.norm.reference import rms_norm_reference
from anymamba.ops.numerics import accumulate_dtype
from anymamba.ops.rotation import (
    cumulate_angles_reference,
    cumulate_quaternions_reference,
    quaternion_increment,
    quaternion_to_matrix,
)

__all__ = ["by_angle_reference", "by_quaternion_reference"]


def by_angle_reference(
    x_bsmgr: tuple[Tensor, Tensor],
    weight_r: tuple[Tensor, Tensor],
    bias_hmr: tuple[Tensor, Tensor],
    rate_bsa: Tensor,
    dt_bsh: Tensor,
    initial_bha: Tensor,
    eps: tuple[float, float],
    pairing: str,
    turns: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply pairs, as complex numbers, by exp(i angle)."""
    increment_bsha = dt_bsh.unsqueeze(-1) * rate_bsa.unsqueeze(2)
    angle_bsha, final_bha = cumulate_angles_reference(
        increment_bsha, initial_bha, cu_seqlens=cu_seqlens
    )
    turn_bs1ha = torch.polar(torch.ones_like(angle_bsha), angle_bsha).unsqueeze(2)
    keys = []
    for x, weight, bias, small in zip(x_bsmgr, weight_r, bias_hmr, eps, strict=True):
        wide = _spread(x, weight, bias, small)
        if turns:
            wide = _turn_pairs(wide, turn_bs1ha, pairing)
        keys.append(wide.to(x.dtype))
    return keys[0], keys[1], final_bha


def by_quaternion_reference(
    x_bsmgr: tuple[Tensor, Tensor],
    weight_r: tuple[Tensor, Tensor],
    bias_hmr: tuple[Tensor, Tensor],
    raw_bshj3: Tensor,
    dt_bsh: Tensor,
    initial_bhj4: Tensor,
    eps: tuple[float, float],
    rotation_range: float,
    turns: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply blocks of four by the transposed matrix of the cumulative quaternion."""
    increment_bshj4 = quaternion_increment(raw_bshj3, dt_bsh, rotation_range)
    turn_bshj4, final_bhj4 = cumulate_quaternions_reference(
        increment_bshj4, initial_bhj4, cu_seqlens=cu_seqlens
    )
    matrix = quaternion_to_matrix(turn_bshj4).mT.unsqueeze(2)
    keys = []
    for x, weight, bias, small in zip(x_bsmgr, weight_r, bias_hmr, eps, strict=True):
        wide = _spread(x, weight, bias, small)
        if turns:
            width = 4 * turn_bshj4.shape[3]
            blocks = wide[..., :width].unflatten(-1, (-1, 4, 1))
            wide = torch.cat([(matrix @ blocks).flatten(-3), wide[..., width:]], -1)
        keys.append(wide.to(x.dtype))
    return keys[0], keys[1], final_bhj4


def _spread(x_bsmgr: Tensor, weight_r: Tensor, bias_hmr: Tensor, eps: float) -> Tensor:
    """Norm, repeat each group for its heads, add the bias, all in the wide dtype."""
    wide = x_bsmgr.to(accumulate_dtype(x_bsmgr.dtype))
    normed_bsmgr = rms_norm_reference(wide, weight_r, eps=eps)
    heads = bias_hmr.shape[0] // x_bsmgr.shape[3]
    return normed_bsmgr.repeat_interleave(heads, 3) + bias_hmr.transpose(0, 1).to(wide.dtype)


def _turn_pairs(x_bsmhr: Tensor, turn_bs1ha: Tensor, pairing: str) -> Tensor:
    count, half = turn_bs1ha.shape[-1], x_bsmhr.shape[-1] // 2
    split = (half, 2) if pairing == "interleaved" else (2, half)
    axis = -1 if pairing == "interleaved" else -2
    u, w = x_bsmhr.unflatten(-1, split).unbind(axis)
    turned = torch.complex(u[..., :count], w[..., :count]) * turn_bs1ha
    u = torch.cat([turned.real, u[..., count:]], -1)
    w = torch.cat([turned.imag, w[..., count:]], -1)
    return torch.stack([u, w], axis).flatten(-2)
