"""One token in place: `mamba_ssm.ops.triton.selective_state_update`."""

import torch
from torch import Tensor

from anymamba.compat.arguments import (
    check_index,
    gate,
    inference_only,
    precision,
    require,
    step_sizes,
    write_rows_,
)
from anymamba.errors import ConfigError, ShapeError
from anymamba.notation import bind_dims
from anymamba.ops import selective_scan_step, ssd_step

__all__ = ["selective_state_update"]


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """Advance a Mamba-1 or Mamba-2 state by one token, in place; inference only.

        state = exp(dt A) state + dt B x            out = (C state + D x) silu(z)

    The state is overwritten, so there is no backward: values flow, and a gradient that arrives
    raises `BackendError`. `selective_scan_step` and `ssd_step` of `anymamba.ops` are the pure,
    differentiable forms.

    Args:
        state: (batch, dim, dstate) or (batch, nheads, dim, dstate); changed in place. With
            `state_batch_indices` the first axis is the pool's, any size.
        x: (batch, dim) or (batch, nheads, dim).
        dt: like x. Mamba-2 passes `expand`ed views; then the cheaper form per head runs.
        A: (dim, dstate) or (nheads, dim, dstate).
        B: (batch, dstate) or (batch, ngroups, dstate).
        C: like B.
        D: (dim,) or (nheads, dim).
        z: gate like x.
        dt_bias: (dim,) or (nheads, dim).
        dt_softplus: whether softplus follows the step sizes.
        state_batch_indices: the pool's row of each batch row (batch,); a negative entry is
            padding: its output is zero and no state changes.

    Returns:
        The output like x.

    Raises:
        ShapeError: a rank or a size is wrong.
        DtypeError: an argument is no tensor, or float64 meets another precision.
        ConfigError: the groups do not divide the heads.

    Example:
        >>> state, one = torch.ones(1, 1, 1), torch.ones(1, 1)
        >>> selective_state_update(state, one, one, torch.zeros(1, 1), one, one)
        tensor([[2.]])
        >>> state
        tensor([[[2.]]])
    """
    where = "selective_state_update"
    require(where, state=state, x=x, dt=dt, A=A, B=B, C=C)
    if state.dim() not in (3, 4):
        raise ShapeError(
            f"{where}: state must have the axes (batch, dim, dstate) or (batch, nheads, dim, "
            f"dstate); got shape {tuple(state.shape)}."
        )
    with torch.no_grad():
        y = _update(
            where,
            _with_axis(state, 4, 1),
            _with_axis(x, 3, 1),
            _with_axis(dt, 3, 1),
            _with_axis(A, 3, 0),
            _with_axis(B, 3, 1),
            _with_axis(C, 3, 1),
            None if D is None else _with_axis(D, 2, 0),
            None if z is None else _with_axis(z, 3, 1),
            None if dt_bias is None else _with_axis(dt_bias, 2, 0),
            dt_softplus,
            state_batch_indices,
        )
        y = y if state.dim() == 4 else y.squeeze(1)
    return inference_only(where, y, state, x, dt, A, B, C, D, z, dt_bias)


def _with_axis(tensor: Tensor, rank: int, axis: int) -> Tensor:
    """Insert the head or group axis that the layout without heads leaves out."""
    return tensor.unsqueeze(axis) if tensor.dim() == rank - 1 else tensor


def _update(
    where: str,
    state: Tensor,
    x_bhp: Tensor,
    dt_bhp: Tensor,
    a_hpr: Tensor,
    b_bgr: Tensor,
    c_bgr: Tensor,
    skip_hp: Tensor | None,
    z_bhp: Tensor | None,
    bias_hp: Tensor | None,
    dt_softplus: bool,
    index: Tensor | None,
) -> Tensor:
    compute = precision(
        where,
        state=state,
        x=x_bhp,
        dt=dt_bhp,
        A=a_hpr,
        B=b_bgr,
        C=c_bgr,
        D=skip_hp,
        z=z_bhp,
        dt_bias=bias_hp,
    )
    dims = bind_dims(
        where,
        x_bhp=x_bhp,
        dt_bhp=dt_bhp,
        A_hpr=a_hpr,
        B_bgr=b_bgr,
        C_bgr=c_bgr,
        D_hp=skip_hp,
        z_bhp=z_bhp,
        dt_bias_hp=bias_hp,
    )
    if dims["h"] % dims["g"]:
        raise ConfigError(
            f"{where}: the groups of B and C must divide the heads {dims['h']}; got {dims['g']}."
        )
    index_b = None
    old_bhpr = state
    if index is not None:
        index_b = check_index(where, "state_batch_indices", index, dims["b"], state.device)
        bind_dims(where, A_hpr=a_hpr, state_qhpr=state)
        old_bhpr = state.index_select(0, index_b.clamp(min=0))
    bind_dims(where, x_bhp=x_bhp, A_hpr=a_hpr, state_bhpr=old_bhpr)
    # Asked before the casts: a cast writes a broadcast out.
    tied = _repeats(a_hpr, -1) and _repeats(a_hpr, -2) and _repeats(dt_bhp, -1)
    tied = tied and (bias_hp is None or _repeats(bias_hp, -1))
    if tied:
        a_hpr, dt_bhp = a_hpr[:, :1, :1], dt_bhp[..., :1]
        bias_hp = None if bias_hp is None else bias_hp[:, :1]
    y_bhp, new_bhpr = _step(
        old_bhpr.to(compute),
        x_bhp.to(compute),
        step_sizes(dt_bhp, bias_hp, dt_softplus, compute),
        a_hpr.to(compute),
        b_bgr.to(compute),
        c_bgr.to(compute),
        None if skip_hp is None else skip_hp.to(compute),
        tied,
    )
    write_rows_(state, index_b, old_bhpr, new_bhpr)
    y_bhp = gate(y_bhp, z_bhp, x_bhp.dtype)
    if index_b is None:
        return y_bhp
    return y_bhp.masked_fill((index_b < 0).view(-1, 1, 1), 0)


def _step(
    state_bhpr: Tensor,
    x_bhp: Tensor,
    dt_bhp: Tensor,
    a_hpr: Tensor,
    b_bgr: Tensor,
    c_bgr: Tensor,
    skip_hp: Tensor | None,
    tied: bool,
) -> tuple[Tensor, Tensor]:
    """Take one decay per head if it is `tied` (dt and a have size 1 there), else one per entry."""
    if tied:
        a_h = a_hpr[:, 0, 0]
        return ssd_step(x_bhp, dt_bhp[..., 0], a_h, b_bgr, c_bgr, skip_hp, state_bhpr)
    y_bi, state_bir = selective_scan_step(
        x_bhp.flatten(1),
        dt_bhp.flatten(1),
        a_hpr.flatten(0, 1),
        b_bgr,
        c_bgr,
        None if skip_hp is None else skip_hp.flatten(),
        state_bhpr.flatten(1, 2),
    )
    heads = x_bhp.shape[1]
    return y_bi.unflatten(1, (heads, -1)), state_bir.unflatten(1, (heads, -1))


def _repeats(tensor: Tensor, axis: int) -> bool:
    """Return whether an axis is a broadcast: all its entries share one place in memory."""
    return tensor.stride(axis) == 0 or tensor.shape[axis] == 1
