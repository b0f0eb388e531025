"""The exponential-trapezoid recurrence as its definition: one loop over time, the judge."""

import torch
from torch import Tensor

from anymamba.ops.numerics import accumulate_dtype

__all__ = ["trapezoid_reference"]


def trapezoid_reference(
    v_bsmhp: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    dt_bsh: Tensor,
    da_bsh: Tensor,
    lam_bsh: Tensor,
    ssm_bhpr: Tensor,
    k_bmgr: Tensor,
    prev_v_bmhp: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run README section 2 token by token; returns y and the final state."""
    compute = accumulate_dtype(v_bsmhp.dtype)
    repeat = v_bsmhp.shape[3] // b_bsmgr.shape[3]

    def per_head(z: Tensor) -> Tensor:
        return z.to(compute).repeat_interleave(repeat, -2)

    state_bhpr = ssm_bhpr.to(compute)
    v_old_bmhp, k_old_bmhr = prev_v_bmhp.to(compute), per_head(k_bmgr)
    ys = []
    for t in range(v_bsmhp.shape[1]):
        v_bmhp = v_bsmhp[:, t].to(compute)
        b_bmhr, c_bmhr = per_head(b_bsmgr[:, t]), per_head(c_bsmgr[:, t])
        dt, lam = dt_bsh[:, t, :, None, None].to(compute), lam_bsh[:, t, :, None, None].to(compute)
        alpha = da_bsh[:, t, :, None, None].to(compute).exp()
        before_bhpr = torch.einsum("bmhp,bmhr->bhpr", v_old_bmhp, k_old_bmhr)
        now_bhpr = torch.einsum("bmhp,bmhr->bhpr", v_bmhp, b_bmhr)
        state_bhpr = alpha * state_bhpr + (1 - lam) * dt * alpha * before_bhpr + lam * dt * now_bhpr
        ys.append(torch.einsum("bhpr,bmhr->bmhp", state_bhpr, c_bmhr))
        v_old_bmhp, k_old_bmhr = v_bmhp, b_bmhr
    return torch.stack(ys, 1).to(v_bsmhp.dtype), state_bhpr
