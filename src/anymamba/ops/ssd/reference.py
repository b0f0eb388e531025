"""The SSD core as its definition: one loop over time. It judges every other implementation."""

from itertools import pairwise

import torch
from torch import Tensor

from anymamba.ops.numerics import accumulate_dtype

__all__ = ["ssd_core_reference"]


def ssd_core_reference(
    v_bsmhp: Tensor,
    da_bsh: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    initial_bhpr: Tensor,
    scale_bsh: Tensor,
    own_bsh: Tensor,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence of README section 2 token by token; autograd does the rest."""
    if cu_seqlens is not None:
        ys, finals = [], []
        for place, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
            final_1hpr = initial_bhpr[place : place + 1].to(accumulate_dtype(v_bsmhp.dtype))
            if start < stop:
                y_1smhp, final_1hpr = ssd_core_reference(
                    v_bsmhp[:, start:stop],
                    da_bsh[:, start:stop],
                    b_bsmgr[:, start:stop],
                    c_bsmgr[:, start:stop],
                    final_1hpr,
                    scale_bsh[:, start:stop],
                    own_bsh[:, start:stop],
                )
                ys.append(y_1smhp)
            finals.append(final_1hpr)
        return torch.cat(ys, 1), torch.cat(finals, 0)

    compute = accumulate_dtype(v_bsmhp.dtype)
    heads_per_group = v_bsmhp.shape[3] // b_bsmgr.shape[3]
    v = v_bsmhp.to(compute)
    b = b_bsmgr.to(compute).repeat_interleave(heads_per_group, 3)
    c = c_bsmgr.to(compute).repeat_interleave(heads_per_group, 3)
    alpha_bsh = da_bsh.to(compute).exp()
    scale, own = scale_bsh.to(compute), own_bsh.to(compute)
    state_bhpr = initial_bhpr.to(compute)
    ys = []
    for v_bmhp, b_bmhr, c_bmhr, alpha_bh, scale_bh, own_bh in zip(
        *(x.unbind(1) for x in (v, b, c, alpha_bsh, scale, own)), strict=True
    ):
        decayed_bhpr = alpha_bh[..., None, None] * state_bhpr
        made_bhpr = torch.einsum("bmhp,bmhr->bhpr", v_bmhp, b_bmhr)
        state_bhpr = decayed_bhpr + scale_bh[..., None, None] * made_bhpr
        read_bhpr = decayed_bhpr + own_bh[..., None, None] * made_bhpr
        ys.append(torch.einsum("bhpr,bmhr->bmhp", read_bhpr, c_bmhr))
    return torch.stack(ys, 1).to(v_bsmhp.dtype), state_bhpr
