"""The Mamba-2 scan of `mamba_ssm.ops.triton.ssd_combined` and `modules.ssd_minimal`."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.compat.arguments import gate, precision, require, segments_of, step_sizes
from anymamba.errors import ConfigError, DtypeError, PackingError
from anymamba.notation import bind_dims
from anymamba.ops import SsdOutput, SsdPath, clamp_dt, ssd, ssd_core

__all__ = [
    "ScanTensors",
    "check_state_dtype",
    "mamba_chunk_scan_combined",
    "scan",
    "ssd_minimal_discrete",
]

NO_LIMIT = (0.0, float("inf"))


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Run the Mamba-2 scan.

        dt = clamp(dt + dt_bias, through softplus if asked, dt_limit)
        H[t] = exp(dt[t] A) H[t-1] + dt[t] x[t] B[t]^T
        y[t] = (H[t] C[t] + D x[t]) silu(z[t])

    Args:
        x: (batch, length, nheads, headdim).
        dt: step sizes (batch, length, nheads).
        A: decay rates (nheads,); negative.
        B: (batch, length, ngroups, dstate).
        C: like B.
        chunk_size: positive; accepted. The operator chooses its own chunks, results do not depend
            on them.
        D: weight of the direct path (nheads,) or (nheads, headdim).
        z: gate like x.
        dt_bias: (nheads,).
        initial_states: state before the first token (batch, nheads, headdim, dstate); it seeds the
            first sequence of a row.
        seq_idx: sequence of each token (batch, length), integers; the state restarts where the
            label changes.
        cu_seqlens: borders of the sequences of a single row; read only with
            `return_varlen_states`, and then they separate sequences also without `seq_idx`.
        dt_softplus: whether softplus follows the step sizes.
        dt_limit: (low, high) for the step sizes.
        return_final_states: return the state after the last token of each row too.
        return_varlen_states: return the state after each sequence of `cu_seqlens` too.
        state_dtype: dtype of the varlen states; states are always accumulated in float32 or wider.

    Returns:
        The output like x, then in this order what was asked for: final states
        (batch, nheads, headdim, dstate), varlen states (sequences, nheads, headdim, dstate). Both
        carry gradients.

    Raises:
        ShapeError: a rank or a size is wrong.
        DtypeError: an argument is no tensor, or float64 meets another precision.
        ConfigError: an option is out of range, or the groups do not divide the heads.
        PackingError: `seq_idx` or `cu_seqlens` do not describe the rows, or contradict each other.

    Example:
        >>> x, dt = torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1)
        >>> one = torch.ones(1, 2, 1, 1)
        >>> mamba_chunk_scan_combined(x, dt, torch.zeros(1), one, one, 256).flatten()
        tensor([1., 2.])
    """
    where = "mamba_chunk_scan_combined"
    y, final, varlen = scan(
        where,
        ScanTensors(x, dt, A, B, C, D, z, dt_bias, initial_states),
        chunk_size,
        dt_softplus,
        dt_limit,
        seq_idx,
        _borders(where, cu_seqlens) if return_varlen_states else None,
    )
    results = [y]
    if return_final_states:
        results.append(final)
    if varlen is not None:
        results.append(varlen.to(check_state_dtype(where, state_dtype) or varlen.dtype))
    return tuple(results) if len(results) > 1 else y


def ssd_minimal_discrete(
    X: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    block_len: int,
    initial_states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the SSD scan on inputs that are already discrete.

        H[t] = exp(A[t]) H[t-1] + X[t] B[t]^T            Y[t] = H[t] C[t]

    Args:
        X: (batch, length, nheads, headdim).
        A: log-decays (batch, length, nheads); not positive.
        B: (batch, length, nheads, dstate).
        C: like B.
        block_len: chunk length; need not divide the length.
        initial_states: state before the first token (batch, 1, nheads, headdim, dstate), or
            without the second axis.

    Returns:
        Y like X and the final state (batch, nheads, headdim, dstate); both carry gradients.

    Raises:
        ShapeError: a rank or a size is wrong.
        DtypeError: an argument is no tensor, or float64 meets another precision.
        ConfigError: `block_len` is not positive.

    Example:
        >>> X, A = torch.ones(1, 2, 1, 1), torch.zeros(1, 2, 1)
        >>> Y, final = ssd_minimal_discrete(X, A, X, X, 2)
        >>> Y.flatten(), final.shape
        (tensor([1., 2.]), torch.Size([1, 1, 1, 1]))
    """
    where = "ssd_minimal_discrete"
    require(where, X=X, A=A, B=B, C=C)
    if initial_states is not None:
        require(where, initial_states=initial_states)
        if initial_states.dim() == 5 and initial_states.shape[1] == 1:
            initial_states = initial_states.squeeze(1)
    bind_dims(where, X_bshp=X, A_bsh=A, B_bshr=B, C_bshr=C, initial_states_bhpr=initial_states)
    v_bsmhp, b_bsmgr, c_bsmgr = X.unsqueeze(2), B.unsqueeze(2), C.unsqueeze(2)
    y_bsmhp, final_bhpr = ssd_core(
        v_bsmhp, A, b_bsmgr, c_bsmgr, initial_states, path=SsdPath.minimal(block_len)
    )
    return y_bsmhp.squeeze(2), final_bhpr


class ScanTensors(NamedTuple):
    """The tensors of a Mamba-2 scan, by layout."""

    x_bshp: Tensor
    dt_bsh: Tensor
    a_h: Tensor
    b_bsgr: Tensor
    c_bsgr: Tensor
    skip: Tensor | None
    z_bshp: Tensor | None
    bias_h: Tensor | None
    initial_bhpr: Tensor | None = None  # seeds the first sequence of each row
    every_hpr: Tensor | None = None  # seeds every sequence


def scan(
    where: str,
    given: ScanTensors,
    chunk_size: int,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    seq_idx: Tensor | None,
    borders: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return gated outputs, the state after each row, and that after each packed sequence."""
    compute = _check(where, given, chunk_size)
    dt_bsh = step_sizes(given.dt_bsh, given.bias_h, dt_softplus, compute)
    dt_bsh = clamp_dt(dt_bsh, (dt_limit[0], dt_limit[1]))
    if not dt_softplus:
        # The official lower limit of 0 holds for raw step sizes too; softplus never needs it.
        dt_bsh = dt_bsh.clamp(min=0)
    given = given._replace(dt_bsh=dt_bsh)
    varlen = None
    if borders is not None:
        (y_bshp, final), varlen = _varlen(where, given, seq_idx, borders, compute)
    elif seq_idx is not None:
        y_bshp, final = _segmented(where, given, seq_idx, compute)
    else:
        start = given.initial_bhpr
        if given.every_hpr is not None:
            start = given.every_hpr.expand(given.x_bshp.shape[0], -1, -1, -1)
        y_bshp, final = _run(given, start, None)
    return gate(y_bshp, given.z_bshp, given.x_bshp.dtype), final, varlen


def _run(given: ScanTensors, start: Tensor | None, borders: Tensor | None) -> SsdOutput:
    return ssd(
        given.x_bshp,
        given.dt_bsh,
        given.a_h,
        given.b_bsgr,
        given.c_bsgr,
        given.skip,
        start,
        cu_seqlens=borders,
    )


def _zeros(given: ScanTensors, count: int, dtype: torch.dtype) -> Tensor:
    x_bshp, states = given.x_bshp, given.b_bsgr.shape[-1]
    return x_bshp.new_zeros(count, *x_bshp.shape[2:], states, dtype=dtype)


def _check(where: str, given: ScanTensors, chunk_size: int) -> torch.dtype:
    require(where, x=given.x_bshp, dt=given.dt_bsh, A=given.a_h, B=given.b_bsgr, C=given.c_bsgr)
    skip = given.skip
    dims = bind_dims(
        where,
        x_bshp=given.x_bshp,
        dt_bsh=given.dt_bsh,
        A_h=given.a_h,
        B_bsgr=given.b_bsgr,
        C_bsgr=given.c_bsgr,
        D_h=skip if skip is None or skip.dim() != 2 else None,
        D_hp=skip if skip is not None and skip.dim() == 2 else None,
        z_bshp=given.z_bshp,
        dt_bias_h=given.bias_h,
        initial_states_bhpr=given.initial_bhpr,
    )
    if dims["h"] % dims["g"]:
        raise ConfigError(
            f"{where}: the groups of B and C must divide the heads {dims['h']}; got {dims['g']}."
        )
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ConfigError(f"{where}: chunk_size must be a positive integer; got {chunk_size!r}.")
    return precision(where, **given._asdict())


def _segmented(where: str, given: ScanTensors, seq_idx: Tensor, compute: torch.dtype) -> SsdOutput:
    """Run labelled segments as one packed row of all tokens."""
    shape = given.x_bshp.shape
    segments = segments_of(where, seq_idx, *shape[:2])
    count = segments.cu_seqlens.shape[0] - 1
    if given.every_hpr is not None:
        start_qhpr = given.every_hpr.expand(count, -1, -1, -1)
    else:
        start_qhpr = _zeros(given, count, compute)
    if given.initial_bhpr is not None:
        start_qhpr = start_qhpr.index_copy(0, segments.first_b, given.initial_bhpr.to(compute))
    row = given._replace(
        x_bshp=given.x_bshp.flatten(0, 1)[None],
        dt_bsh=given.dt_bsh.flatten(0, 1)[None],
        b_bsgr=given.b_bsgr.flatten(0, 1)[None],
        c_bsgr=given.c_bsgr.flatten(0, 1)[None],
    )
    y_1shp, final_qhpr = _run(row, start_qhpr, segments.cu_seqlens)
    return SsdOutput(y_1shp.view(shape), final_qhpr.index_select(0, segments.last_b))


def _varlen(
    where: str,
    given: ScanTensors,
    seq_idx: Tensor | None,
    borders: Tensor,
    compute: torch.dtype,
) -> tuple[SsdOutput, Tensor]:
    """Run one row of sequences with known borders; tokens behind the last border are padding."""
    batch, length = given.x_bshp.shape[:2]
    if batch != 1:
        raise PackingError(
            f"{where}: return_varlen_states needs all sequences in one row, so batch must be 1; "
            f"got {batch}."
        )
    if seq_idx is not None:
        _check_labels(where, seq_idx, borders, length)
    # One more sequence, usually empty, for what lies behind the last border.
    borders = F.pad(borders.to(given.x_bshp.device, torch.int64), (0, 1), value=length)
    filled_q = borders.diff() > 0
    start_qhpr = _zeros(given, filled_q.shape[0], compute)
    if given.initial_bhpr is not None:
        opens_q = filled_q & (borders[:-1] == 0)
        start_qhpr = torch.where(
            opens_q.view(-1, 1, 1, 1), given.initial_bhpr.to(compute), start_qhpr
        )
    y_bshp, end_qhpr = _run(given, start_qhpr, borders)
    place_q = torch.arange(filled_q.shape[0], device=borders.device)
    last = (place_q * filled_q).max().view(1)
    return SsdOutput(y_bshp, end_qhpr.index_select(0, last)), end_qhpr[:-1]


def _borders(where: str, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        raise PackingError(
            f"{where}: return_varlen_states needs cu_seqlens, the borders of the sequences; "
            "got None."
        )
    require(where, cu_seqlens=cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{where}: cu_seqlens must be int32 or int64; got {cu_seqlens.dtype}.")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise PackingError(
            f"{where}: cu_seqlens must have one axis with at least 2 borders; "
            f"got shape {tuple(cu_seqlens.shape)}."
        )
    return cu_seqlens


def _check_labels(where: str, seq_idx: Tensor, borders: Tensor, length: int) -> None:
    """Check that labels change where sequences end; the end of the last sequence is free."""
    if torch.compiler.is_compiling() or seq_idx.device.type == "meta":
        return
    changes = segments_of(where, seq_idx, 1, length).cu_seqlens[1:-1]
    inside = borders.to(changes)[1:-1].unique()
    inside = inside[(inside > 0) & (inside < length)]
    extra = changes[~torch.isin(changes, borders.to(changes))]
    missing = inside[~torch.isin(inside, changes)]
    # The last border may close padding that has a label of its own, or none.
    missing = missing[missing != borders.to(changes)[-1]]
    if extra.numel() or missing.numel():
        raise PackingError(
            f"{where}: seq_idx must change its label exactly at the borders of cu_seqlens; got "
            f"labels that change at {changes.tolist()} and borders {borders.tolist()}."
        )


def check_state_dtype(where: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """Check that a state's dtype is a floating one, or None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise DtypeError(f"{where}: state_dtype must be a floating dtype or None; got {dtype!r}.")
    return dtype
