"""The Mamba-3 scan: the exponential-trapezoid recurrence on top of the SSD core."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.errors import CacheError, ConfigError, ShapeError
from anymamba.notation import bind_dims
from anymamba.ops.checks import check_groups, check_one_precision, guard
from anymamba.ops.numerics import full_precision
from anymamba.ops.packing import Packing, packing
from anymamba.ops.select import select_impl
from anymamba.ops.ssd import SSD_CORE, SsdPath, ssd_core
from anymamba.ops.trapezoid.coefficients import TrapezoidCoefficients, lookahead_scale
from anymamba.ops.trapezoid.reference import trapezoid_reference

__all__ = [
    "PATHWAYS",
    "TrapezoidOutput",
    "TrapezoidState",
    "boundary_seed",
    "same_step",
    "trapezoid_scan",
    "trapezoid_step",
]

PATHWAYS = ("single", "double")


class TrapezoidState(NamedTuple):
    """What one call hands to the next: the state, and the last token's key and value."""

    ssm_bhpr: Tensor
    k_bmgr: Tensor
    v_bmhp: Tensor


class TrapezoidOutput(NamedTuple):
    """Result of the Mamba-3 scan, or of one of its steps."""

    y: Tensor
    state: TrapezoidState


def trapezoid_scan(
    v_bsmhp: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    coefficients: TrapezoidCoefficients,
    state: TrapezoidState | None = None,
    *,
    pathway: str = "single",
    path: SsdPath | None = None,
    impl: str = "auto",
    cu_seqlens: Tensor | None = None,
) -> TrapezoidOutput:
    """Run the Mamba-3 scan over a sequence, from a state to a state.

        H[t] = alpha[t] H[t-1] + beta[t] sum_q v[t-1,q] b[t-1,q]^T + gamma[t] sum_q v[t,q] b[t,q]^T
        y[t,q] = H[t] c[t,q]

    Args:
        v_bsmhp: values; the rank axis already multiplied in.
        b_bsmgr: keys after norm, bias and rotation; per group or per head.
        c_bsmgr: queries, prepared like the keys.
        coefficients: dt, da and lam; each (b, s, h).
        state: from the previous call; zeros when omitted; one row per sequence when packed.
        pathway: "single" runs the core once, "double" twice; the same numbers.
        path: algorithm and chunk length of the core.
        impl: "auto", "portable", "native" or "reference".
        cu_seqlens: borders of packed sequences; batch must be 1.

    Returns:
        `TrapezoidOutput(y_bsmhp, state)`.
    """
    where = "trapezoid_scan"
    dims = bind_dims(
        where,
        v_bsmhp=v_bsmhp,
        b_bsmgr=b_bsmgr,
        c_bsmgr=c_bsmgr,
        dt_bsh=coefficients.dt,
        da_bsh=coefficients.da,
        lam_bsh=coefficients.lam,
    )
    check_groups(where, dims["h"], dims["g"])
    if pathway not in PATHWAYS:
        raise ConfigError(f"{where}: pathway must be one of {PATHWAYS}; got {pathway!r}.")
    compute = check_one_precision(
        where, v_bsmhp=v_bsmhp, b_bsmgr=b_bsmgr, c_bsmgr=c_bsmgr, **coefficients._asdict()
    )
    coefficients = TrapezoidCoefficients(*(x.to(compute) for x in coefficients))
    pack = None
    if cu_seqlens is not None:
        pack = packing(where, cu_seqlens, dims["b"], dims["s"], v_bsmhp.device)
    rows = dims["b"] if pack is None else pack.count
    state = _state(where, state, rows, v_bsmhp, b_bsmgr, compute)
    weights = coefficients.dt, coefficients.lam  # what the core's weights are made of
    core_tensors = (v_bsmhp, coefficients.da, b_bsmgr, c_bsmgr, state.ssm_bhpr, *weights)
    chosen = select_impl(where, impl, SSD_CORE, core_tensors, path)
    guard(where, v_bsmhp=v_bsmhp, b_bsmgr=b_bsmgr, c_bsmgr=c_bsmgr, **coefficients._asdict())

    with full_precision(v_bsmhp):
        if chosen == "reference":
            y_bsmhp, ssm_bhpr = _by_reference(
                v_bsmhp, b_bsmgr, c_bsmgr, coefficients, state, cu_seqlens
            )
        else:
            run = _single if pathway == "single" else _double
            y_bsmhp, ssm_bhpr = run(
                *(v_bsmhp, b_bsmgr, c_bsmgr, coefficients, state, pack),
                {"path": path, "impl": chosen, "cu_seqlens": cu_seqlens},
            )
    guard(where, y_bsmhp=y_bsmhp, ssm_bhpr=ssm_bhpr)
    if pack is None:
        # Copies: a view would keep the whole sequence alive.
        last = TrapezoidState(ssm_bhpr, b_bsmgr[:, -1].clone(), v_bsmhp[:, -1].clone())
    else:
        last = TrapezoidState(
            ssm_bhpr, pack.last(b_bsmgr, state.k_bmgr), pack.last(v_bsmhp, state.v_bmhp)
        )
    return TrapezoidOutput(y_bsmhp.to(v_bsmhp.dtype), last)


def _state(
    where: str,
    state: TrapezoidState | None,
    rows: int,
    v_bsmhp: Tensor,
    b_bsmgr: Tensor,
    compute: torch.dtype,
) -> TrapezoidState:
    """Check a given state, its sum widened for computing, or make an empty one."""
    rank, heads, width = v_bsmhp.shape[2:]
    groups, size = b_bsmgr.shape[3:]
    if state is None:
        return TrapezoidState(
            v_bsmhp.new_zeros(rows, heads, width, size, dtype=compute),
            b_bsmgr.new_zeros(rows, rank, groups, size),
            v_bsmhp.new_zeros(rows, rank, heads, width),
        )
    if not isinstance(state, TrapezoidState):
        raise CacheError(f"{where}: state must be a TrapezoidState; got {type(state).__name__}.")
    wanted = (
        (rows, heads, width, size),
        (rows, rank, groups, size),
        (rows, rank, heads, width),
    )
    for (name, tensor), shape in zip(state._asdict().items(), wanted, strict=True):
        if tuple(tensor.shape) != shape:
            raise ShapeError(
                f"{where}: {name} of the state must have shape {shape}; got "
                f"{tuple(tensor.shape)}. Its first axis is the batch, or the packed sequences."
            )
    check_one_precision(where, values=v_bsmhp, **state._asdict())
    guard(where, **state._asdict())
    return state._replace(ssm_bhpr=state.ssm_bhpr.to(compute))


def _single(v, b, c, coefficients, state, pack, how):
    """README 3.1: one pass with look-ahead weights, and each token's own weight."""
    scale_bsh = lookahead_scale(coefficients, pack)
    seed_bhpr = boundary_seed(coefficients, state, pack)
    return ssd_core(v, coefficients.da, b, c, seed_bhpr, scale_bsh, coefficients.gamma, **how)


def _double(v, b, c, coefficients, state, pack, how):
    """README 3.2: one pass for the tokens themselves and one for their predecessors."""
    # Widened: a pass rounds its output to the dtype of its values, and only the sum may be rounded.
    now, before = (x.to(coefficients.da.dtype) for x in (v, _shift(v, state.v_bmhp, pack)))
    before_b = _shift(b, state.k_bmgr, pack)
    own, ssm = ssd_core(now, coefficients.da, b, c, state.ssm_bhpr, coefficients.gamma, **how)
    previous, made = ssd_core(before, coefficients.da, before_b, c, None, coefficients.beta, **how)
    return own + previous, ssm + made


def _shift(x_bs: Tensor, before_b: Tensor, pack: Packing | None) -> Tensor:
    """Delay a sequence by one token; the state's token comes first in each sequence."""
    before_b = before_b.to(x_bs.dtype)
    if pack is None:
        return torch.cat([before_b.unsqueeze(1), x_bs[:, :-1]], 1)
    delayed_1s = torch.cat([x_bs[:, :1], x_bs[:, :-1]], 1)
    opens = (pack.position_s == 0).view(1, -1, *[1] * (x_bs.dim() - 2))
    return torch.where(opens, before_b[pack.sequence_s].unsqueeze(0), delayed_1s)


def _by_reference(v, b, c, coefficients, state, cu_seqlens):
    if cu_seqlens is None:
        return trapezoid_reference(v, b, c, *coefficients, *state)
    borders = cu_seqlens.tolist()
    ys, finals = [], []
    for place, (start, stop) in enumerate(pairwise(borders)):
        row = [part[place : place + 1] for part in state]
        if start == stop:
            finals.append(row[0])
            continue
        piece = (x[:, start:stop] for x in (v, b, c, *coefficients))
        y_1smhp, final_1hpr = trapezoid_reference(*piece, *row)
        ys.append(y_1smhp)
        finals.append(final_1hpr)
    return torch.cat(ys, 1), torch.cat(finals)


def boundary_seed(
    coefficients: TrapezoidCoefficients, state: TrapezoidState, pack: Packing | None = None
) -> Tensor:
    """Add to the state what the previous call could not know: `(1 - lam[1]) dt[1] v k^T`."""
    pending_bsh = coefficients.pending
    if pack is None:
        first_bh = pending_bsh[:, 0]
    else:
        first_bh = pack.first(pending_bsh, torch.zeros_like(pending_bsh[0, :1]))
    return state.ssm_bhpr + _outer(state.v_bmhp, state.k_bmgr, first_bh)


def _outer(v_bmhp: Tensor, k_bmgr: Tensor, weight_bh: Tensor) -> Tensor:
    """Return weight * sum over ranks of v k^T: (b, h, p, r)."""
    heads, groups = v_bmhp.shape[2], k_bmgr.shape[2]
    k_bmhr = k_bmgr.to(weight_bh.dtype).repeat_interleave(heads // groups, 2)
    weighted_bmhp = weight_bh[:, None, :, None] * v_bmhp.to(weight_bh.dtype)
    return torch.einsum("bmhp,bmhr->bhpr", weighted_bmhp, k_bmhr)


def same_step(gamma_bsh: Tensor, v_bsmhp: Tensor, b_bsmgr: Tensor, c_bsmgr: Tensor) -> Tensor:
    """Return each token's own part of the output: `gamma sum_q' (c_q . b_q') v_q'`."""
    where = "same_step"
    dims = bind_dims(where, gamma_bsh=gamma_bsh, v_bsmhp=v_bsmhp, b_bsmgr=b_bsmgr, c_bsmgr=c_bsmgr)
    check_groups(where, dims["h"], dims["g"])
    dtype = check_one_precision(
        where, gamma_bsh=gamma_bsh, v_bsmhp=v_bsmhp, b_bsmgr=b_bsmgr, c_bsmgr=c_bsmgr
    )
    with full_precision(v_bsmhp):
        return _same_step(gamma_bsh.to(dtype), v_bsmhp.to(dtype), b_bsmgr, c_bsmgr)


def _same_step(gamma_bsh: Tensor, v_bsmhp: Tensor, b_bsmgr: Tensor, c_bsmgr: Tensor) -> Tensor:
    dtype = gamma_bsh.dtype
    heads, groups = v_bsmhp.shape[3], b_bsmgr.shape[3]
    if v_bsmhp.shape[2] == 1:
        gram_bsg = (c_bsmgr.to(dtype) * b_bsmgr.to(dtype)).sum(-1).squeeze(2)
        weight_bsh = gamma_bsh * gram_bsg.repeat_interleave(heads // groups, 2)
        return weight_bsh[:, :, None, :, None] * v_bsmhp
    c_bsgmr, b_bsgMr = c_bsmgr.to(dtype).transpose(2, 3), b_bsmgr.to(dtype).transpose(2, 3)
    gram_bsgmM = torch.einsum("bsgmr,bsgMr->bsgmM", c_bsgmr, b_bsgMr)
    gram_bshmM = gram_bsgmM.repeat_interleave(heads // groups, 2)
    weighted_bsMhp = gamma_bsh[:, :, None, :, None] * v_bsmhp
    return torch.einsum("bshmM,bsMhp->bsmhp", gram_bshmM, weighted_bsMhp)


def trapezoid_step(
    v_bmhp: Tensor,
    b_bmgr: Tensor,
    c_bmgr: Tensor,
    coefficients: TrapezoidCoefficients,
    state: TrapezoidState,
) -> TrapezoidOutput:
    """Advance the Mamba-3 scan by one token; the arguments are those of the scan without time."""
    where = "trapezoid_step"
    dims = bind_dims(
        where,
        v_bmhp=v_bmhp,
        b_bmgr=b_bmgr,
        c_bmgr=c_bmgr,
        dt_bh=coefficients.dt,
        da_bh=coefficients.da,
        lam_bh=coefficients.lam,
        ssm_bhpr=state.ssm_bhpr,
        k_bmgr=state.k_bmgr,
        v_state_bmhp=state.v_bmhp,
    )
    check_groups(where, dims["h"], dims["g"])
    compute = check_one_precision(
        where,
        value=v_bmhp,
        b_bmgr=b_bmgr,
        c_bmgr=c_bmgr,
        **coefficients._asdict(),
        **state._asdict(),
    )
    guard(where, value=v_bmhp, b_bmgr=b_bmgr, c_bmgr=c_bmgr, **coefficients._asdict())
    coefficients = TrapezoidCoefficients(*(x.to(compute) for x in coefficients))
    state = state._replace(ssm_bhpr=state.ssm_bhpr.to(compute))
    with full_precision(v_bmhp):
        own_bhpr = _outer(v_bmhp, b_bmgr, coefficients.gamma)
        before_bhpr = boundary_seed(
            TrapezoidCoefficients(*(x.unsqueeze(1) for x in coefficients)), state
        )
        ssm_bhpr = torch.addcmul(own_bhpr, coefficients.da.exp()[..., None, None], before_bhpr)
        c_bmhr = c_bmgr.to(compute).repeat_interleave(dims["h"] // dims["g"], 2)
        y_bmhp = torch.einsum("bhpr,bmhr->bmhp", ssm_bhpr, c_bmhr)
    guard(where, y_bmhp=y_bmhp, ssm_bhpr=ssm_bhpr)
    return TrapezoidOutput(y_bmhp.to(v_bmhp.dtype), TrapezoidState(ssm_bhpr, b_bmgr, v_bmhp))
