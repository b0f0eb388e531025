"""The adjoint of a block of chunks (README section 4): the backward of `serial_recalculated`."""

from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.ops.ssd.stages import (
    ChunkDecay,
    add_own,
    k2_ssd_bmm,
    mix_by_head,
    outer_by_group,
    over_positions,
    own_pairs,
    read_by_group,
    weigh,
)

__all__ = ["CoreGradients", "block_adjoint", "grown_outer"]


class CoreGradients(NamedTuple):
    """Gradients of the core's seven tensors, in their order."""

    v: Tensor
    da: Tensor
    b: Tensor
    c: Tensor
    initial: Tensor
    scale: Tensor
    own: Tensor


class _Pairs(NamedTuple):
    """What the (target, source) matrices of the chunks contribute; only pairs with a later target.

    The pairs of a time with itself do not decay, so they must not enter the decay's gradient: there
    they would cancel only up to rounding, and swamp a small gradient (README section 5).
    """

    cb_gfF: Tensor  # this one of all pairs
    weight_hfF: Tensor
    grad_cb_gfF: Tensor
    across_lh: Tensor  # what the pairs around each step but the first send to its decay


def grown_outer(grad_y_fhp: Tensor, c_fgr: Tensor, decay: ChunkDecay) -> Tensor:
    """Return what the outputs of a chunk send to the state it starts from: (..., h, p, r)."""
    return outer_by_group(decay.grow(grad_y_fhp.shape[-3]) * grad_y_fhp, c_fgr)


def block_adjoint(
    grad_y_fhp: Tensor,
    v_fhp: Tensor,
    decay: ChunkDecay,
    b_fgr: Tensor,
    c_fgr: Tensor,
    scale_lh: Tensor,
    own_lh: Tensor,
    entry_hpr: Tensor,
    grad_exit_hpr: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Differentiate chunks whose states and state gradients are known; any leading axes.

    Args:
        grad_y_fhp: gradient of the output.
        v_fhp: values, as all inputs here in the compute dtype.
        decay: running log-decays.
        b_fgr: keys.
        c_fgr: queries.
        scale_lh: weights in the state and in later outputs.
        own_lh: weights in the output of the same time.
        entry_hpr: states before the chunks.
        grad_exit_hpr: gradients of the states after the chunks.

    Returns:
        Gradients of v, da, b, c, scale and own.
    """
    fused, length = v_fhp.shape[-3], decay.rest_hl.shape[-1]
    scale_fh1 = over_positions(scale_lh, fused)
    scaled_fhp = scale_fh1 * v_fhp
    pairs = _pair_terms(grad_y_fhp, scaled_fhp, b_fgr, c_fgr, decay)
    grow_fh1, fade_fh1 = decay.grow(fused), decay.fade(fused)

    carried_fhp = read_by_group(c_fgr, entry_hpr).mul_(grow_fh1)
    from_exit_fhp = read_by_group(b_fgr, grad_exit_hpr).mul_(fade_fh1)
    # README 4.2: a step fades whatever crosses it. Every term is summed by itself, none cancels.
    left_lh = _over_ranks((from_exit_fhp * scaled_fhp).sum(-1), length)
    grad_scaled_fhp = from_exit_fhp.add_(mix_by_head(pairs.weight_hfF.mT, grad_y_fhp))
    grad_scale_lh = _over_ranks((grad_scaled_fhp * v_fhp).sum(-1), length)
    read_lh = _over_ranks(carried_fhp.mul_(grad_y_fhp).sum(-1), length)
    kept_h = (grad_exit_hpr * entry_hpr).sum((-1, -2)) * decay.end().exp()
    grad_da_lh = read_lh.flip(-2).cumsum(-2).flip(-2) + kept_h.unsqueeze(-2)
    grad_da_lh[..., 1:, :] += left_lh[..., :-1, :].cumsum(-2) + pairs.across_lh

    own_glmM, grad_cb_gfF = own_pairs(pairs.cb_gfF, length), pairs.grad_cb_gfF
    del pairs, carried_fhp  # the largest matrices of the block; what follows does not need them
    grad_v_fhp = add_own(grad_scaled_fhp.mul_(scale_fh1), own_glmM.mT, own_lh, grad_y_fhp)
    grad_own_lh, grad_own_glmM = _own_terms(grad_y_fhp, v_fhp, own_lh, own_glmM)
    own_pairs(grad_cb_gfF, length).add_(grad_own_glmM)
    grad_b_fgr = _mix_by_group(grad_cb_gfF.mT, c_fgr)
    grad_b_fgr += _back_by_group(scaled_fhp.mul_(fade_fh1), grad_exit_hpr, b_fgr)
    grad_c_fgr = _mix_by_group(grad_cb_gfF, b_fgr)
    grad_c_fgr += _back_by_group(grow_fh1 * grad_y_fhp, entry_hpr, c_fgr)
    return grad_v_fhp, grad_da_lh, grad_b_fgr, grad_c_fgr, grad_scale_lh, grad_own_lh


def _over_ranks(x_fh: Tensor, length: int) -> Tensor:
    """Sum over the ranks of each time: (..., f, h) -> (..., l, h)."""
    return x_fh.unflatten(-2, (length, -1)).sum(-2)


def _pair_terms(
    grad_y_fhp: Tensor, scaled_fhp: Tensor, b_fgr: Tensor, c_fgr: Tensor, decay: ChunkDecay
) -> _Pairs:
    """Form the matrices of the chunks, strictly below the diagonal."""
    between_hll = decay.between(strict=True)
    cb_gfF = k2_ssd_bmm(c_fgr, b_fgr)
    weight_hfF = weigh(cb_gfF, between_hll)
    grad_weight_hfF = grad_y_fhp.transpose(-3, -2) @ scaled_fhp.movedim(-3, -1)
    *lead, heads, fused, _ = weight_hfF.shape
    groups, length = b_fgr.shape[-2], between_hll.shape[-1]
    by_time = (length, fused // length, length, fused // length)
    both_hll = grad_weight_hfF * weight_hfF
    if fused != length:
        both_hll = both_hll.view(*lead, heads, *by_time).sum((-1, -3))
    # Entry t - 1: sources before t, targets from t on.
    across_lh = both_hll.cumsum_(-1).tril_(-1).sum(-2)[..., :-1].mT
    del both_hll
    grad_weight_hfF.view(*lead, heads, *by_time).mul_(between_hll[..., :, None, :, None])
    by_group = grad_weight_hfF.view(*lead, groups, heads // groups, fused, fused)
    return _Pairs(cb_gfF, weight_hfF, by_group.sum(-3), across_lh)


def _own_terms(
    grad_y_fhp: Tensor, v_fhp: Tensor, own_lh: Tensor, own_glmM: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `own` and of C B^T of each time with itself."""
    *lead, groups, length, rank, _ = own_glmM.shape
    heads = own_lh.shape[-1]
    if rank == 1:
        grad_lhmM = (grad_y_fhp * v_fhp).sum(-1)[..., None, None]
    else:
        grad_y_lmhp, v_lMhp = (
            x.reshape(*lead, length, rank, heads, -1) for x in (grad_y_fhp, v_fhp)
        )
        grad_lhmM = torch.einsum("...lmhp,...lMhp->...lhmM", grad_y_lmhp, v_lMhp)
    grad_lgimM = grad_lhmM.unflatten(-3, (groups, -1))
    own_lg1mM = own_glmM.movedim(-4, -3).unsqueeze(-3)
    grad_own_lh = (grad_lgimM * own_lg1mM).sum((-1, -2)).flatten(-2)
    weighed_lgimM = own_lh.unflatten(-1, (groups, -1))[..., None, None] * grad_lgimM
    return grad_own_lh, weighed_lgimM.sum(-3).movedim(-3, -4)


def _mix_by_group(weight_gfF: Tensor, x_Fgr: Tensor) -> Tensor:
    return (weight_gfF @ x_Fgr.transpose(-3, -2)).transpose(-3, -2)


def _back_by_group(rows_fhp: Tensor, state_hpr: Tensor, like_fgr: Tensor) -> Tensor:
    """Contract rows with states over heads and widths: the adjoint of `read_by_group`."""
    *lead, fused, groups, size = like_fgr.shape
    rows_gfi = rows_fhp.reshape(*lead, fused, groups, -1).transpose(-3, -2)
    return (rows_gfi @ state_hpr.reshape(*lead, groups, -1, size)).transpose(-3, -2)
