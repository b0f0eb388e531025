"""The five stages K1 to K5 of the chunked scan, on any leading axes.

The stages see chunks: the time axis is `l`, and time and rank are fused into `f` (time-major,
f = t * m + q). `...` stands for (batch, chunks) in the serial algorithm and for (batch,) in the
recomputing one, so both share every formula. Groups of B and C are never expanded to heads: all
heads of a group ride in one matrix product as extra columns.

Formulas: README section 3.
"""

import torch
from torch import Tensor

__all__ = [
    "fuse_rank",
    "k1_ssd_chunk_cumsum",
    "k2_ssd_bmm",
    "k3_ssd_chunk_state",
    "k4_ssd_state_passing",
    "k5_ssd_chunk_scan",
    "later",
    "pair_decay",
]

# Below these exponents exp() is exactly zero, subnormal numbers included. Clamping there changes
# no decay and keeps one enormous step from drowning its neighbours in the running sum.
_VANISHING = {torch.float32: -120.0, torch.float64: -800.0}


def k1_ssd_chunk_cumsum(da_lh: Tensor) -> tuple[Tensor, Tensor]:
    """K1: running log-decay inside each chunk.

    Args:
        da_lh: log-decay of each step; (..., l, h).

    Returns:
        cum (..., h, l) and its value at the chunk's end (..., h).
    """
    cum_hl = da_lh.clamp(min=_VANISHING[da_lh.dtype]).transpose(-1, -2).cumsum(-1)
    return cum_hl, cum_hl[..., -1]


def k2_ssd_bmm(c_fgr: Tensor, b_fgr: Tensor) -> Tensor:
    """K2: inner products of every target with every source, per group: (..., g, f, F)."""
    return c_fgr.transpose(-3, -2) @ b_fgr.movedim(-3, -1)


def k3_ssd_chunk_state(v_fhp: Tensor, b_fgr: Tensor, cum_hl: Tensor, end_h: Tensor) -> Tensor:
    """K3: the state a chunk would leave behind if it started from zero: (..., h, p, r)."""
    fade_fh1 = fuse_rank(end_h.unsqueeze(-1) - cum_hl, v_fhp.shape[-3]).exp().mT.unsqueeze(-1)
    return outer_by_group(fade_fh1 * v_fhp, b_fgr)


def k4_ssd_state_passing(
    made_bnhpr: Tensor, end_bnh: Tensor, initial_bhpr: Tensor
) -> tuple[Tensor, Tensor]:
    """K4: carry the state from chunk to chunk.

    Returns:
        The state each chunk starts from (b, n, h, p, r), and the final state (b, h, p, r).
    """
    decay_bnh11 = end_bnh.exp()[..., None, None]
    state = initial_bhpr
    entries = []
    for made_bhpr, decay_bh11 in zip(made_bnhpr.unbind(1), decay_bnh11.unbind(1), strict=True):
        entries.append(state)
        state = torch.addcmul(made_bhpr, decay_bh11, state)
    return torch.stack(entries, 1), state


def k5_ssd_chunk_scan(
    cum_hl: Tensor,
    v_fhp: Tensor,
    c_fgr: Tensor,
    cb_gfF: Tensor,
    entry_hpr: Tensor,
    strict: bool,
) -> Tensor:
    """K5: the output, from the entry state and from the chunk's own tokens: (..., f, h, p)."""
    grow_fh1 = fuse_rank(cum_hl, v_fhp.shape[-3]).exp().mT.unsqueeze(-1)
    carried_fhp = grow_fh1 * read_by_group(c_fgr, entry_hpr)
    decay_hll = pair_decay(cum_hl, later(cum_hl.shape[-1], cum_hl.device), strict)
    return carried_fhp + mix_by_head(weigh(cb_gfF, decay_hll), v_fhp)


def later(length: int, device: torch.device) -> Tensor:
    """Return which (target, source) times have the target later: the strict lower triangle."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril(-1)


def pair_decay(cum_hl: Tensor, later_ll: Tensor, strict: bool) -> Tensor:
    """Return exp(cum[t] - cum[s]) where t > s, one on the diagonal unless strict, else zero.

    Masked before the exponential: above the diagonal the difference is positive and may overflow.
    The diagonal is a constant, not exp(0): it would otherwise send two large gradients into the
    running sum that cancel only approximately (README section 5).

    Returns:
        (..., h, l, l).
    """
    gap_hll = cum_hl.unsqueeze(-1) - cum_hl.unsqueeze(-2)
    decay_hll = gap_hll.masked_fill(~later_ll, -torch.inf).exp()
    if strict:
        return decay_hll
    return decay_hll + torch.eye(cum_hl.shape[-1], dtype=cum_hl.dtype, device=cum_hl.device)


def fuse_rank(x_l: Tensor, fused: int) -> Tensor:
    """Repeat each time step for every rank: (..., l) -> (..., f)."""
    length = x_l.shape[-1]
    if fused == length:
        return x_l
    return x_l.unsqueeze(-1).expand(*x_l.shape, fused // length).flatten(-2)


def weigh(cb_gfF: Tensor, decay_hll: Tensor) -> Tensor:
    """Multiply group products by head decays: (..., g, f, F), (..., h, l, l) -> (..., h, f, F)."""
    *lead, groups, fused, _ = cb_gfF.shape
    heads, length = decay_hll.shape[-3], decay_hll.shape[-1]
    rank = fused // length
    decay = decay_hll.view(*lead, groups, heads // groups, length, 1, length, 1)
    cb = cb_gfF.view(*lead, groups, 1, length, rank, length, rank)
    return (cb * decay).view(*lead, heads, fused, fused)


def mix_by_head(weight_hfF: Tensor, v_fhp: Tensor) -> Tensor:
    """Mix sources into targets, head by head: (..., h, f, F) x (..., F, h, p) -> (..., f, h, p)."""
    return (weight_hfF @ v_fhp.transpose(-3, -2)).transpose(-3, -2)


def read_by_group(c_fgr: Tensor, state_hpr: Tensor) -> Tensor:
    """Read states with C: (..., f, g, r) x (..., h, p, r) -> (..., f, h, p)."""
    *lead, fused, groups, size = c_fgr.shape
    heads, width = state_hpr.shape[-3], state_hpr.shape[-2]
    columns_gir = state_hpr.reshape(*lead, groups, heads // groups * width, size)
    read_gfi = c_fgr.transpose(-3, -2) @ columns_gir.mT
    return read_gfi.transpose(-3, -2).reshape(*lead, fused, heads, width)


def outer_by_group(v_fhp: Tensor, b_fgr: Tensor) -> Tensor:
    """Sum outer products over f: (..., f, h, p) x (..., f, g, r) -> (..., h, p, r)."""
    *lead, fused, heads, width = v_fhp.shape
    groups, size = b_fgr.shape[-2:]
    rows_fgi = v_fhp.reshape(*lead, fused, groups, heads // groups * width)
    made_gir = rows_fgi.movedim(-3, -1) @ b_fgr.transpose(-3, -2)
    return made_gir.reshape(*lead, heads, width, size)
