"""The adjoint of one chunk (README section 4): what `serial_recalculated` does in its backward."""

from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.ops.ssd.stages import (
    fuse_rank,
    k1_ssd_chunk_cumsum,
    k2_ssd_bmm,
    later,
    mix_by_head,
    outer_by_group,
    pair_decay,
    read_by_group,
    weigh,
)

__all__ = ["CoreGradients", "chunk_adjoint"]


class CoreGradients(NamedTuple):
    """Gradients of the core's five tensors, in their order; of a sequence or of a chunk."""

    v: Tensor
    da: Tensor
    b: Tensor
    c: Tensor
    initial: Tensor


class _Pairs(NamedTuple):
    """What the (target, source) matrices of a chunk contribute."""

    weight_bhfF: Tensor
    own_bglmM: Tensor | None
    grad_cb_bgfF: Tensor
    grad_cum_bfh: Tensor | None  # only in the pairwise form


def chunk_adjoint(
    grad_y_bfhp: Tensor,
    v_bfhp: Tensor,
    da_blh: Tensor,
    b_bfgr: Tensor,
    c_bfgr: Tensor,
    entry_bhpr: Tensor,
    exit_bhpr: Tensor,
    grad_exit_bhpr: Tensor,
    strict: bool,
    pairwise: bool,
) -> CoreGradients:
    """Differentiate one chunk; the gradient of its entry state comes last.

    Args:
        grad_y_bfhp: gradient of the chunk's output.
        v_bfhp: values, as all inputs here in the compute dtype.
        da_blh: log-decays.
        b_bfgr: keys.
        c_bfgr: queries.
        entry_bhpr: state before the chunk.
        exit_bhpr: state after the chunk.
        grad_exit_bhpr: gradient of the state after the chunk.
        strict: whether a token leaves itself out of its output.
        pairwise: sum the decay's gradient over pairs instead of using the short identity.
    """
    length, fused = da_blh.shape[1], v_bfhp.shape[1]
    cum_bhl, end_bh = k1_ssd_chunk_cumsum(da_blh)
    pairs = _pair_terms(grad_y_bfhp, v_bfhp, b_bfgr, c_bfgr, cum_bhl, strict, pairwise)
    grow_bfh1 = fuse_rank(cum_bhl, fused).exp().mT.unsqueeze(-1)
    fade_bfh1 = fuse_rank(end_bh.unsqueeze(-1) - cum_bhl, fused).exp().mT.unsqueeze(-1)

    carried_bfhp = read_by_group(c_bfgr, entry_bhpr).mul_(grow_bfh1)
    from_exit_bfhp = read_by_group(b_bfgr, grad_exit_bhpr).mul_(fade_bfh1)
    if pairs.grad_cum_bfh is None:
        # README 4.2: output and value gradient already hold all the sums over pairs.
        y_bfhp = carried_bfhp.add_(mix_by_head(pairs.weight_bhfF, v_bfhp))
        grad_v_bfhp = from_exit_bfhp.add_(mix_by_head(pairs.weight_bhfF.mT, grad_y_bfhp))
        grad_cum_bfh = y_bfhp.mul_(grad_y_bfhp).sum(-1) - (v_bfhp * grad_v_bfhp).sum(-1)
        grad_end_bh = (grad_exit_bhpr * exit_bhpr).sum((-1, -2))
    else:
        # README 4.3: every term by itself, no cancellation.
        left_bfh = (from_exit_bfhp * v_bfhp).sum(-1)
        grad_v_bfhp = from_exit_bfhp.add_(mix_by_head(pairs.weight_bhfF.mT, grad_y_bfhp))
        grad_cum_bfh = pairs.grad_cum_bfh + carried_bfhp.mul_(grad_y_bfhp).sum(-1) - left_bfh
        kept_bh = (grad_exit_bhpr * entry_bhpr).sum((-1, -2)) * end_bh.exp()
        grad_end_bh = left_bfh.sum(1) + kept_bh

    if pairs.own_bglmM is not None:
        grad_v_bfhp += _mix_own(pairs.own_bglmM, grad_y_bfhp)
    grad_cb_bgfF = pairs.grad_cb_bgfF
    del pairs, carried_bfhp  # the largest matrices of the chunk; what follows does not need them
    grad_b_bfgr = _mix_by_group(grad_cb_bgfF.mT, c_bfgr)
    grad_b_bfgr += _back_by_group(fade_bfh1 * v_bfhp, grad_exit_bhpr, b_bfgr)
    grown_grad_bfhp = grow_bfh1 * grad_y_bfhp
    grad_c_bfgr = _mix_by_group(grad_cb_bgfF, b_bfgr)
    grad_c_bfgr += _back_by_group(grown_grad_bfhp, entry_bhpr, c_bfgr)
    grad_cum_blh = grad_cum_bfh.unflatten(1, (length, -1)).sum(2)
    grad_cum_blh[:, -1] += grad_end_bh

    grad_entry_bhpr = outer_by_group(grown_grad_bfhp, c_bfgr)
    grad_entry_bhpr.addcmul_(end_bh.exp()[..., None, None], grad_exit_bhpr)
    grad_da_blh = grad_cum_blh.flip(1).cumsum(1).flip(1)
    return CoreGradients(grad_v_bfhp, grad_da_blh, grad_b_bfgr, grad_c_bfgr, grad_entry_bhpr)


def _pair_terms(
    grad_y_bfhp: Tensor,
    v_bfhp: Tensor,
    b_bfgr: Tensor,
    c_bfgr: Tensor,
    cum_bhl: Tensor,
    strict: bool,
    pairwise: bool,
) -> _Pairs:
    """Form the matrices of a chunk, with the pairs of a time with itself kept apart.

    Those pairs do not decay, so they must not enter the decay's gradient: there they would cancel
    only up to rounding, and swamp a small gradient (README section 5).
    """
    length = cum_bhl.shape[-1]
    decay_bhll = pair_decay(cum_bhl, later(length, cum_bhl.device), strict=True)
    cb_bgfF = k2_ssd_bmm(c_bfgr, b_bfgr)
    weight_bhfF = weigh(cb_bgfF, decay_bhll)
    grad_weight_bhfF = grad_y_bfhp.transpose(1, 2) @ v_bfhp.permute(0, 2, 3, 1)
    grad_cum_bfh = None
    if pairwise:
        both_bhfF = grad_weight_bhfF * weight_bhfF
        grad_cum_bfh = (both_bhfF.sum(-1) - both_bhfF.sum(-2)).mT
    batch, heads, fused, _ = weight_bhfF.shape
    groups, rank = b_bfgr.shape[2], fused // length
    by_time = (length, rank, length, rank)
    own_bglmM = None
    if not strict:
        own_bglmM = cb_bgfF.view(batch, groups, *by_time).diagonal(0, 2, 4).permute(0, 1, 4, 2, 3)
        decay_bhll.diagonal(0, -1, -2).fill_(1)
    grad_weight_bhfF.view(batch, heads, *by_time).mul_(decay_bhll[:, :, :, None, :, None])
    by_group = grad_weight_bhfF.view(batch, groups, heads // groups, fused, fused)
    return _Pairs(weight_bhfF, own_bglmM, by_group.sum(2), grad_cum_bfh)


def _mix_own(own_bglmM: Tensor, grad_y_bfhp: Tensor) -> Tensor:
    """Send output gradients back to the values of the same time, across ranks."""
    batch, groups, length, rank, _ = own_bglmM.shape
    heads, width = grad_y_bfhp.shape[2:]
    grad_y_blmgi = grad_y_bfhp.reshape(batch, length, rank, groups, -1)
    grad_v_blMgi = torch.einsum("bglmM,blmgi->blMgi", own_bglmM, grad_y_blmgi)
    return grad_v_blMgi.reshape(batch, length * rank, heads, width)


def _mix_by_group(weight_bgfF: Tensor, x_bFgr: Tensor) -> Tensor:
    return (weight_bgfF @ x_bFgr.transpose(1, 2)).transpose(1, 2)


def _back_by_group(rows_bfhp: Tensor, state_bhpr: Tensor, like_bfgr: Tensor) -> Tensor:
    """Contract rows with a state over heads and widths: the adjoint of `read_by_group`."""
    batch, fused, groups, size = like_bfgr.shape
    rows_bgfi = rows_bfhp.reshape(batch, fused, groups, -1).transpose(1, 2)
    return (rows_bgfi @ state_bhpr.reshape(batch, groups, -1, size)).transpose(1, 2)
