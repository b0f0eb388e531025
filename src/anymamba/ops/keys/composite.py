"""Keys and queries from the norm, the scans and the rotations of this room: the portable form.

Differentiable as often as those are. Weights are given per group, so that a mapped axis can become
more groups.
"""

import torch
from torch import Tensor

from anymamba.ops.norm import rms_norm
from anymamba.ops.rotation import (
    cumulate_angles,
    cumulate_quaternions,
    quaternion_increment,
    rotate_blocks,
    rotate_pairs,
)

__all__ = ["by_angle", "by_quaternion"]


def by_angle(
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    b_weight_gr: Tensor,
    c_weight_gr: Tensor,
    b_bias_hmr: Tensor,
    c_bias_hmr: Tensor,
    rate_bsga: Tensor,
    dt_bsh: Tensor,
    initial_bha: Tensor,
    cu_seqlens: Tensor | None,
    b_eps: float,
    c_eps: float,
    pairing: str,
    turns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys, the queries and the last angles."""
    b_bsmhr = _spread(b_bsmgr, b_weight_gr, b_bias_hmr, b_eps)
    c_bsmhr = _spread(c_bsmgr, c_weight_gr, c_bias_hmr, c_eps)
    dt_bsge1 = dt_bsh.unflatten(2, (rate_bsga.shape[2], -1)).unsqueeze(-1)
    increment_bsha = (dt_bsge1 * rate_bsga.unsqueeze(3)).flatten(2, 3)
    angle_bsha, final_bha = cumulate_angles(
        increment_bsha, initial_bha.to(increment_bsha.dtype), cu_seqlens=cu_seqlens
    )
    if turns:
        angle_bs1ha = angle_bsha.unsqueeze(2)
        b_bsmhr = rotate_pairs(b_bsmhr, angle_bs1ha, pairing)
        c_bsmhr = rotate_pairs(c_bsmhr, angle_bs1ha, pairing)
    return b_bsmhr, c_bsmhr, final_bha


def by_quaternion(
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    b_weight_gr: Tensor,
    c_weight_gr: Tensor,
    b_bias_hmr: Tensor,
    c_bias_hmr: Tensor,
    raw_bshj3: Tensor,
    dt_bsh: Tensor,
    initial_bhj4: Tensor,
    cu_seqlens: Tensor | None,
    b_eps: float,
    c_eps: float,
    rotation_range: float,
    turns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys, the queries and the last rotations."""
    b_bsmhr = _spread(b_bsmgr, b_weight_gr, b_bias_hmr, b_eps)
    c_bsmhr = _spread(c_bsmgr, c_weight_gr, c_bias_hmr, c_eps)
    increment_bshj4 = quaternion_increment(raw_bshj3, dt_bsh, rotation_range)
    turn_bshj4, final_bhj4 = cumulate_quaternions(
        increment_bshj4, initial_bhj4.to(increment_bshj4.dtype), cu_seqlens=cu_seqlens
    )
    if turns:
        turn_bs1hj4 = turn_bshj4.unsqueeze(2)
        b_bsmhr = rotate_blocks(b_bsmhr, turn_bs1hj4)
        c_bsmhr = rotate_blocks(c_bsmhr, turn_bs1hj4)
    return b_bsmhr, c_bsmhr, final_bhj4


def _spread(x_bsmgr: Tensor, weight_gr: Tensor, bias_hmr: Tensor, eps: float) -> Tensor:
    """Norm each group, spread it over its heads, add the bias of rank and head."""
    groups, size = weight_gr.shape
    flat = rms_norm(
        x_bsmgr.flatten(-2), weight_gr.flatten(), eps=eps, group_size=size, impl="portable"
    )
    x_bsmg1r = flat.unflatten(-1, (groups, 1, size))
    # Not a transpose: its gradient would have other strides than the bias, and DDP warns of that.
    bias_mger = torch.stack(bias_hmr.unbind(1)).unflatten(1, (groups, -1))
    return torch.add(x_bsmg1r, bias_mger).to(x_bsmgr.dtype).flatten(3, 4)
