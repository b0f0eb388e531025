"""The five stages K1 to K5 of the chunked scan, on any leading axes.

The stages see chunks: the time axis is `l`, and time and rank are fused into `f` (time-major,
f = t * m + q). `...` stands for (batch, chunks) in the serial algorithm and for (batch,) in the
recomputing one, so both share every formula. Groups of B and C are never expanded to heads: all
heads of a group ride in one matrix product as extra columns.

Formulas: README section 3.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "ChunkDecay",
    "add_own",
    "fuse_rank",
    "k1_ssd_chunk_cumsum",
    "k2_ssd_bmm",
    "k3_ssd_chunk_state",
    "k4_ssd_state_passing",
    "k5_ssd_chunk_scan",
    "later",
    "over_positions",
    "own_pairs",
]

# Below these exponents exp() is exactly zero, subnormal numbers included: clamping there changes
# no decay, and bounds the running sum.
_VANISHING = {torch.float32: -120.0, torch.float64: -800.0}
# Log-decays are split into multiples of 1 / 64 and a rest. Sums of multiples are exact in float32
# up to 2^18, which is 2184 steps of the strongest decay.
_UNITS = 64.0


class ChunkDecay(NamedTuple):
    """Running log-decay of a chunk, in two parts so that differences do not cancel.

    `cum = whole + rest`. Late in a chunk with strong decay cum is large, and the difference of two
    of them would lose the small decay between neighbours. The whole parts are exact multiples of
    1 / 64, so their difference is exact; the rests are small (README section 5).
    """

    whole_hl: Tensor
    rest_hl: Tensor

    def grow(self, fused: int) -> Tensor:
        """Return exp(cum) for each fused position: (..., f, h, 1)."""
        return _by_position(self.whole_hl + self.rest_hl, fused)

    def fade(self, fused: int) -> Tensor:
        """Return exp(end - cum) for each fused position: (..., f, h, 1)."""
        to_end_hl = self.whole_hl[..., -1:] - self.whole_hl
        return _by_position(to_end_hl + (self.rest_hl[..., -1:] - self.rest_hl), fused)

    def end(self) -> Tensor:
        """Return the log-decay of the whole chunk: (..., h)."""
        return self.whole_hl[..., -1] + self.rest_hl[..., -1]

    def between(self, strict: bool) -> Tensor:
        """Return exp(cum[t] - cum[s]) where t > s, else 0; on the diagonal 1 unless strict.

        Masked before the exponential: above the diagonal the difference is positive and may
        overflow. The diagonal is a constant, not exp(0): it would otherwise send two large
        gradients into the running sum that cancel only approximately (README section 5).

        Returns:
            (..., h, l, l).
        """
        whole, rest = self.whole_hl, self.rest_hl
        gap_hll = whole.unsqueeze(-1) - whole.unsqueeze(-2)
        gap_hll = gap_hll.add_(rest.unsqueeze(-1)).sub_(rest.unsqueeze(-2))
        is_later_ll = later(whole.shape[-1], whole.device)
        decay_hll = gap_hll.masked_fill_(~is_later_ll, -torch.inf).exp_()
        if strict:
            return decay_hll
        return decay_hll + torch.eye(whole.shape[-1], dtype=whole.dtype, device=whole.device)


def k1_ssd_chunk_cumsum(da_lh: Tensor) -> ChunkDecay:
    """K1: running log-decay inside each chunk, from the log-decay of each step (..., l, h)."""
    da_hl = da_lh.clamp(min=_VANISHING[da_lh.dtype]).transpose(-1, -2)
    whole_hl = (da_hl.detach() * _UNITS).round() / _UNITS
    return ChunkDecay(whole_hl.cumsum(-1), (da_hl - whole_hl).cumsum(-1))


def _by_position(log_hl: Tensor, fused: int) -> Tensor:
    return fuse_rank(log_hl.exp(), fused).mT.unsqueeze(-1)


def k2_ssd_bmm(c_fgr: Tensor, b_fgr: Tensor) -> Tensor:
    """K2: inner products of every target with every source, per group: (..., g, f, F)."""
    return c_fgr.transpose(-3, -2) @ b_fgr.movedim(-3, -1)


def k3_ssd_chunk_state(v_fhp: Tensor, b_fgr: Tensor, decay: ChunkDecay) -> Tensor:
    """K3: the state a chunk would leave behind if it started from zero: (..., h, p, r)."""
    return outer_by_group(decay.fade(v_fhp.shape[-3]) * v_fhp, b_fgr)


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
    decay: ChunkDecay,
    v_fhp: Tensor,
    c_fgr: Tensor,
    cb_gfF: Tensor,
    entry_hpr: Tensor,
    strict: bool,
) -> Tensor:
    """K5: the output, from the entry state and from the chunk's own tokens: (..., f, h, p)."""
    carried_fhp = decay.grow(v_fhp.shape[-3]) * read_by_group(c_fgr, entry_hpr)
    return carried_fhp + mix_by_head(weigh(cb_gfF, decay.between(strict)), v_fhp)


def later(length: int, device: torch.device) -> Tensor:
    """Return which (target, source) times have the target later: the strict lower triangle."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril(-1)


def fuse_rank(x_l: Tensor, fused: int) -> Tensor:
    """Repeat each time step for every rank: (..., l) -> (..., f)."""
    length = x_l.shape[-1]
    if fused == length:
        return x_l
    return x_l.unsqueeze(-1).expand(*x_l.shape, fused // length).flatten(-2)


def over_positions(x_lh: Tensor, fused: int) -> Tensor:
    """Repeat numbers per step and head for every rank, to multiply rows: (..., f, h, 1)."""
    *lead, length, heads = x_lh.shape
    if fused != length:
        x_lh = x_lh.unsqueeze(-2).expand(*lead, length, fused // length, heads).flatten(-3, -2)
    return x_lh.unsqueeze(-1)


def own_pairs(cb_gfF: Tensor, length: int) -> Tensor:
    """Return C B^T of each time with itself, all ranks with all ranks: (..., g, l, m, M)."""
    *lead, groups, fused, _ = cb_gfF.shape
    by_time = cb_gfF.view(*lead, groups, length, fused // length, length, fused // length)
    return by_time.diagonal(0, -4, -2).movedim(-1, -3)


def add_own(y_fhp: Tensor, pairs_glmM: Tensor, own_lh: Tensor, x_fhp: Tensor) -> Tensor:
    """Add to y what the ranks of each time send each other, weighed by `own`: (..., f, h, p)."""
    *lead, groups, length, rank, _ = pairs_glmM.shape
    if rank == 1:
        pairs_lg1 = pairs_glmM[..., 0, 0].mT.unsqueeze(-1)
        weight_lh = (own_lh.unflatten(-1, (groups, -1)) * pairs_lg1).flatten(-2)
        return torch.addcmul(y_fhp, weight_lh.unsqueeze(-1), x_fhp)
    x_lMgi = (over_positions(own_lh, x_fhp.shape[-3]) * x_fhp).reshape(
        *lead, length, rank, groups, -1
    )
    mixed_lmgi = torch.einsum("...glmM,...lMgi->...lmgi", pairs_glmM, x_lMgi)
    return y_fhp + mixed_lmgi.reshape(x_fhp.shape)


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
