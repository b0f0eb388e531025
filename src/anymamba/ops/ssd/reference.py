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
    strict: bool,
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
                    strict,
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
    state_bhpr = initial_bhpr.to(compute)
    ys = []
    for v_bmhp, b_bmhr, c_bmhr, alpha_bh in zip(
        v.unbind(1), b.unbind(1), c.unbind(1), alpha_bsh.unbind(1), strict=True
    ):
        decayed_bhpr = alpha_bh[..., None, None] * state_bhpr
        state_bhpr = decayed_bhpr + torch.einsum("bmhp,bmhr->bhpr", v_bmhp, b_bmhr)
        read_bhpr = decayed_bhpr if strict else state_bhpr
        ys.append(torch.einsum("bhpr,bmhr->bmhp", read_bhpr, c_bmhr))
    return torch.stack(ys, 1).to(v_bsmhp.dtype), state_bhpr
