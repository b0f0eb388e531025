"""The SSD core and the Mamba-2 scan: validation, defaults, choice of algorithm."""

from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.errors import ConfigError, ShapeError
from anymamba.notation import bind_dims
from anymamba.ops.checks import check_groups, check_one_precision, guard
from anymamba.ops.numerics import full_precision
from anymamba.ops.packing import packing
from anymamba.ops.select import select_impl
from anymamba.ops.ssd.path import SsdPath
from anymamba.ops.ssd.reference import ssd_core_reference
from anymamba.ops.ssd.schema import SSD_CORE
from anymamba.ops.ssd.serial import ssd_core_minimal, ssd_core_serial

__all__ = ["CoreOutput", "SsdOutput", "SsdStep", "ssd", "ssd_core", "ssd_step"]


class CoreOutput(NamedTuple):
    """Result of the SSD core."""

    y_bsmhp: Tensor
    final_bhpr: Tensor


class SsdOutput(NamedTuple):
    """Result of the Mamba-2 scan."""

    y_bshp: Tensor
    final_bhpr: Tensor


class SsdStep(NamedTuple):
    """Result of one token of the Mamba-2 scan."""

    y_bhp: Tensor
    state_bhpr: Tensor


def ssd_core(
    v_bsmhp: Tensor,
    da_bsh: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    initial_bhpr: Tensor | None = None,
    scale_bsh: Tensor | None = None,
    own_bsh: Tensor | None = None,
    *,
    strict: bool = False,
    path: SsdPath | None = None,
    impl: str = "auto",
    cu_seqlens: Tensor | None = None,
) -> CoreOutput:
    """Run the one scan behind Mamba-2 and Mamba-3, from a state to a state.

        H[t] = exp(da[t]) H[t-1] + scale[t] sum_q v[t,q] b[t,q]^T
        y[t,q] = (exp(da[t]) H[t-1] + own[t] sum_q' v[t,q'] b[t,q']^T) c[t,q]

    Args:
        v_bsmhp: values; one per rank and head.
        da_bsh: log-decay of each step; not positive, accumulated in float32 beside half types.
        b_bsmgr: keys; per group, groups divide heads.
        c_bsmgr: queries; per group.
        initial_bhpr: state before the first token; zeros when omitted; one row per sequence
            when packed; receives a gradient.
        scale_bsh: weight of a token in the state, and so in later outputs; 1 when omitted.
        own_bsh: weight of a token in its own output; that in the state when omitted.
        strict: leave a token's own contribution out of its output; not together with `own_bsh`.
        path: algorithm and chunk length; see `SsdPath`.
        impl: "auto", "portable", "native" or "reference".
        cu_seqlens: borders of packed sequences; batch must be 1.

    Returns:
        `CoreOutput(y_bsmhp, final_bhpr)`; y has the dtype of v, the state that of accumulation.

    Raises:
        ShapeError, DtypeError, DeviceError, PackingError, ConfigError, BackendError.

    Example:
        >>> v, da = torch.ones(1, 3, 1, 1, 1), torch.zeros(1, 3, 1)
        >>> one = torch.ones(1, 3, 1, 1, 1)
        >>> ssd_core(v, da, one, one).y_bsmhp.flatten()
        tensor([1., 2., 3.])
    """
    where = "ssd_core"
    named = {
        "v_bsmhp": v_bsmhp,
        "da_bsh": da_bsh,
        "b_bsmgr": b_bsmgr,
        "c_bsmgr": c_bsmgr,
        "scale_bsh": scale_bsh,
        "own_bsh": own_bsh,
    }
    dims = bind_dims(where, **named)
    check_groups(where, dims["h"], dims["g"])
    compute = check_one_precision(where, **named, initial=initial_bhpr)
    zero = v_bsmhp.new_zeros((), dtype=compute)
    initial_bhpr = initial_state(
        where,
        initial_bhpr,
        (dims["b"], dims["h"], v_bsmhp.shape[-1], dims["r"]),
        zero,
        cu_seqlens,
        dims["s"],
    )
    if strict and own_bsh is not None:
        raise ConfigError(
            f"{where}: strict is own_bsh = 0, so only one of them can be given; got both. "
            "Leave one of them out."
        )
    given = scale_bsh, zero.expand(da_bsh.shape) if strict else own_bsh
    one = v_bsmhp.new_ones((), dtype=compute)
    weights = _weights(one.expand(da_bsh.shape), *given)
    if path is not None and not isinstance(path, SsdPath):
        raise ConfigError(f"{where}: path must be an SsdPath; got {type(path).__name__}.")
    tensors = (v_bsmhp, da_bsh, b_bsmgr, c_bsmgr, initial_bhpr)
    chosen = select_impl(where, impl, SSD_CORE, (*tensors, *weights), path)
    guard(where, **named, initial=initial_bhpr)
    with full_precision(v_bsmhp):
        if chosen == "reference":
            y_bsmhp, final_bhpr = ssd_core_reference(*tensors, *weights, cu_seqlens)
        else:
            y_bsmhp, final_bhpr = _chunked(
                tensors, weights, given, path or SsdPath(), chosen, cu_seqlens
            )
    guard(where, y_bsmhp=y_bsmhp, final_bhpr=final_bhpr)
    return CoreOutput(y_bsmhp, final_bhpr)


def _weights(
    ones_bsh: Tensor, scale_bsh: Tensor | None, own_bsh: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Fill in what is not given: a scale of 1, and an own weight that is the scale."""
    scale_bsh = ones_bsh if scale_bsh is None else scale_bsh
    return scale_bsh, scale_bsh if own_bsh is None else own_bsh


def _chunked(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    given: tuple[Tensor | None, Tensor | None],
    path: SsdPath,
    kernel: str,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the path's algorithm; the plain ones save the products of weights that are not given."""
    v_bsmhp, b_bsmgr = tensors[0], tensors[2]
    rank = v_bsmhp.shape[2]
    # The matrices inside a chunk have l * m rows, so the rank shortens the chunk.
    chunk_len = max(1, path.chunk_len_or_optimal(b_bsmgr.shape[-1], v_bsmhp.shape[-1]) // rank)
    if path.kind == "minimal":
        return ssd_core_minimal(*tensors, *given, chunk_len, cu_seqlens)
    # A traced loop over chunks would be unrolled anew for every length: trace the operator instead.
    if path.kind == "serial" and not torch.compiler.is_compiling():
        return ssd_core_serial(*tensors, *given, chunk_len, cu_seqlens)
    return SSD_CORE(  # pyright: ignore[reportReturnType]
        *tensors, *weights, chunk_len, cu_seqlens, kernel=kernel
    )


def initial_state(
    where: str,
    initial: Tensor | None,
    shape: tuple[int, ...],
    zero: Tensor,
    cu_seqlens: Tensor | None,
    length: int,
) -> Tensor:
    """Check the initial state's shape, or make a zero one; a pack has one row per sequence."""
    if cu_seqlens is not None:
        count = packing(where, cu_seqlens, shape[0], length, zero.device).count
        shape = (count, *shape[1:])
    if initial is None:
        return zero.expand(shape)
    if initial.shape != shape:
        rows = "batch" if cu_seqlens is None else "packed sequences"
        raise ShapeError(
            f"{where}: the initial state must have shape {tuple(shape)} ({rows} first); "
            f"got {tuple(initial.shape)}."
        )
    return initial


def ssd(
    x_bshp: Tensor,
    dt_bsh: Tensor,
    a_h: Tensor,
    b_bsgr: Tensor,
    c_bsgr: Tensor,
    skip: Tensor | None = None,
    initial_bhpr: Tensor | None = None,
    *,
    path: SsdPath | None = None,
    impl: str = "auto",
    cu_seqlens: Tensor | None = None,
) -> SsdOutput:
    """Run the Mamba-2 scan over a sequence, from a given state to a returned state.

        H[t] = exp(dt[t] a) H[t-1] + dt[t] x[t] b[t]^T        y[t] = H[t] c[t] + skip x[t]

    Args:
        x_bshp: inputs.
        dt_bsh: step sizes after softplus; not negative.
        a_h: decay rates; negative, so that no exponent is ever positive.
        b_bsgr: input directions; per group.
        c_bsgr: output directions; per group.
        skip: weight of the direct path (h,) or (h, p); none when omitted.
        initial_bhpr: state before the first token; zeros when omitted; receives a gradient.
        path: algorithm and chunk length.
        impl: "auto", "portable", "native" or "reference".
        cu_seqlens: borders of packed sequences; batch must be 1.

    Returns:
        `SsdOutput(y_bshp, final_bhpr)`; y has the dtype of x.

    Example:
        >>> x, dt = torch.ones(1, 2, 1, 1), torch.ones(1, 2, 1)
        >>> one = torch.ones(1, 2, 1, 1)
        >>> ssd(x, dt, torch.zeros(1), one, one).y_bshp.flatten()
        tensor([1., 2.])
    """
    where = "ssd"
    dims = bind_dims(where, x_bshp=x_bshp, dt_bsh=dt_bsh, a_h=a_h, b_bsgr=b_bsgr, c_bsgr=c_bsgr)
    check_groups(where, dims["h"], dims["g"])
    compute = check_one_precision(
        where, x_bshp=x_bshp, dt_bsh=dt_bsh, a_h=a_h, b_bsgr=b_bsgr, c_bsgr=c_bsgr, skip=skip
    )
    guard(where, x_bshp=x_bshp, dt_bsh=dt_bsh, a_h=a_h, b_bsgr=b_bsgr, c_bsgr=c_bsgr, skip=skip)
    dt_bsh = dt_bsh.to(compute)
    # The scan rounds its output to the dtype of its values: with a skip that is not yet the result.
    values_bshp = x_bshp if skip is None else x_bshp.to(compute)
    y_bsmhp, final_bhpr = ssd_core(
        values_bshp.unsqueeze(2),
        dt_bsh * a_h.to(compute),
        b_bsgr.unsqueeze(2),
        c_bsgr.unsqueeze(2),
        initial_bhpr,
        dt_bsh,
        path=path,
        impl=impl,
        cu_seqlens=cu_seqlens,
    )
    y_bshp = add_skip(where, y_bsmhp.squeeze(2), x_bshp, skip)
    return SsdOutput(y_bshp.to(x_bshp.dtype), final_bhpr)


def ssd_step(
    x_bhp: Tensor,
    dt_bh: Tensor,
    a_h: Tensor,
    b_bgr: Tensor,
    c_bgr: Tensor,
    skip: Tensor | None,
    state_bhpr: Tensor,
) -> SsdStep:
    """Advance the Mamba-2 scan by one token; the arguments are those of `ssd` without time.

    Example:
        >>> one = torch.ones(1, 1, 1)
        >>> ssd_step(one, one[0], torch.zeros(1), one, one, None, torch.ones(1, 1, 1, 1)).y_bhp
        tensor([[[2.]]])
    """
    where = "ssd_step"
    dims = bind_dims(
        where, x_bhp=x_bhp, dt_bh=dt_bh, a_h=a_h, b_bgr=b_bgr, c_bgr=c_bgr, state_bhpr=state_bhpr
    )
    check_groups(where, dims["h"], dims["g"])
    compute = check_one_precision(
        where,
        x_bhp=x_bhp,
        dt_bh=dt_bh,
        a_h=a_h,
        b_bgr=b_bgr,
        c_bgr=c_bgr,
        skip=skip,
        state=state_bhpr,
    )
    guard(where, x_bhp=x_bhp, dt_bh=dt_bh, a_h=a_h, b_bgr=b_bgr, c_bgr=c_bgr, state=state_bhpr)
    dt_bh = dt_bh.to(compute)
    b_bhr, c_bhr = (
        z.to(compute).repeat_interleave(dims["h"] // dims["g"], 1) for z in (b_bgr, c_bgr)
    )
    alpha_bh = (dt_bh * a_h.to(compute)).exp()
    step_bhp = dt_bh.unsqueeze(-1) * x_bhp
    with full_precision(x_bhp):
        state_bhpr = torch.addcmul(
            step_bhp.unsqueeze(-1) * b_bhr.unsqueeze(-2),
            alpha_bh[..., None, None],
            state_bhpr.to(compute),
        )
        y_bhp = (state_bhpr @ c_bhr.unsqueeze(-1)).squeeze(-1)
    return SsdStep(add_skip(where, y_bhp, x_bhp, skip).to(x_bhp.dtype), state_bhpr)


def add_skip(where: str, y_hp: Tensor, x_hp: Tensor, skip: Tensor | None) -> Tensor:
    """Add the direct path `skip * x`; the weight is per head or per head and width."""
    if skip is None:
        return y_hp
    heads, width = x_hp.shape[-2:]
    if skip.shape not in ((heads,), (heads, width)):
        raise ShapeError(
            f"{where}: skip must have shape ({heads},) or ({heads}, {width}); "
            f"got {tuple(skip.shape)}."
        )
    weight = skip.unsqueeze(-1) if skip.dim() == 1 else skip
    return y_hp + weight.to(y_hp.dtype) * x_hp
