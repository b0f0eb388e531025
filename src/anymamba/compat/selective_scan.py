"""The Mamba-1 scan of `mamba_ssm.ops.selective_scan_interface`, channels first."""

import torch
from torch import Tensor

from anymamba.compat.arguments import gate, precision, require, step_sizes
from anymamba.errors import ConfigError, DtypeError, ShapeError
from anymamba.notation import Dims, bind_dims
from anymamba.ops import accumulate_dtype, selective_scan

__all__ = ["as_complex", "scan", "selective_scan_fn", "selective_scan_ref", "time_first"]

_LAYOUTS = {2: "ir", 3: "brs", 4: "bgrs"}


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the selective scan of Mamba-1, channels first.

        dt = delta + delta_bias, through softplus if asked
        h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] u[t]
        y[t] = (C[t] h[t] + D u[t]) silu(z[t])              complex A: 2 real(C[t] h[t])

    Args:
        u: inputs (batch, dim, length).
        delta: step sizes (batch, dim, length).
        A: decay rates (dim, dstate); real or complex.
        B: (dim, dstate), (batch, dstate, length) or (batch, groups, dstate, length). Beside a
            complex A the last axis holds 2 * length reals: real and imaginary parts in turn.
        C: like B.
        D: weight of the direct path (dim,).
        z: gate (batch, dim, length).
        delta_bias: added to delta (dim,).
        delta_softplus: whether softplus follows.
        return_last_state: return the state after the last token too; it carries gradients.

    Returns:
        The output like u, or the output and the state (batch, dim, dstate).

    Raises:
        ShapeError: a rank or a size is wrong.
        DtypeError: an argument is no tensor, or float64 meets another precision.
        ConfigError: the groups do not divide the channels.

    Example:
        >>> u = delta = torch.ones(1, 1, 3)
        >>> selective_scan_fn(u, delta, torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1))
        tensor([[[1., 2., 3.]]])
    """
    y, last = _scan_channels_first(
        "selective_scan_fn", "auto", u, delta, A, B, C, D, z, delta_bias, delta_softplus
    )
    return (y, last) if return_last_state else y


def selective_scan_ref(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run `selective_scan_fn` as one plain loop over time: slow, and its judge."""
    y, last = _scan_channels_first(
        "selective_scan_ref", "reference", u, delta, A, B, C, D, z, delta_bias, delta_softplus
    )
    return (y, last) if return_last_state else y


def _scan_channels_first(
    where: str,
    impl: str,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Check the layouts, run the scan with time before channels, and turn the result back."""
    require(where, u=u, delta=delta, A=A, B=B, C=C)
    dims = bind_dims(
        where, u_bis=u, delta_bis=delta, A_ir=A, D_i=D, z_bis=z, delta_bias_i=delta_bias
    )
    y_bsi, last_bir = scan(
        where,
        impl,
        u.transpose(1, 2),
        delta.transpose(1, 2),
        A,
        time_first(where, "B", B, A.is_complex(), dims),
        time_first(where, "C", C, A.is_complex(), dims),
        D,
        None if z is None else z.transpose(1, 2),
        delta_bias,
        delta_softplus,
    )
    # Callers view the result as (batch, directions, channels, length), so it has to be contiguous.
    return y_bsi.transpose(1, 2).contiguous(), last_bir


def time_first(where: str, name: str, coefficient: Tensor, pairs: bool, dims: Dims) -> Tensor:
    """Check B or C and move time before the state axis: (i, r), (b, s, r) or (b, s, g, r)."""
    if coefficient.dim() not in _LAYOUTS:
        raise ShapeError(
            f"{where}: {name} must have the axes (dim, dstate), (batch, dstate, length) or "
            f"(batch, groups, dstate, length); got shape {tuple(coefficient.shape)}."
        )
    if coefficient.is_complex() and not pairs:
        raise DtypeError(f"{where}: {name} is complex, so A must be complex too; got a real A.")
    layout = _LAYOUTS[coefficient.dim()]
    expected = [dims.get(letter) for letter in layout]
    if pairs and layout != "ir" and not coefficient.is_complex():
        expected[-1] = 2 * dims["s"]
    if any(
        size not in (None, given) for size, given in zip(expected, coefficient.shape, strict=True)
    ):
        spelled = ", ".join("groups" if size is None else str(size) for size in expected)
        raise ShapeError(
            f"{where}: {name} must have shape ({spelled}); got {tuple(coefficient.shape)}."
        )
    if layout == "bgrs" and (coefficient.shape[1] == 0 or dims["i"] % coefficient.shape[1]):
        raise ConfigError(
            f"{where}: the groups of {name} must divide the channels {dims['i']}; "
            f"got {coefficient.shape[1]}."
        )
    if pairs and layout != "ir" and not coefficient.is_complex():
        coefficient = as_complex(coefficient)
    return coefficient if layout == "ir" else coefficient.movedim(-1, 1)


def as_complex(pairs: Tensor) -> Tensor:
    """Read real and imaginary parts, which lie in turn on the last axis."""
    wide = pairs.to(accumulate_dtype(pairs.dtype))
    return torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())


def scan(
    where: str,
    impl: str,
    u_bsi: Tensor,
    delta_bsi: Tensor,
    A: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor | None,
    z_bsi: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Run the scan with time before channels; b and c as `time_first` returns them."""
    reals = {"u": u_bsi, "delta": delta_bsi, "D": D, "z": z_bsi, "delta_bias": delta_bias}
    if A.is_complex():
        parts = {"A": A, "B": b, "C": c}
        parts = {name: x.real if x.is_complex() else x for name, x in parts.items()}
        compute = precision(where, **reals, **parts)
        dt_bsi = step_sizes(delta_bsi, delta_bias, delta_softplus, compute)
        y_bsi, last_bir = _complex_scan(u_bsi.to(compute), dt_bsi, A, b, c)
        if D is not None:
            y_bsi = y_bsi + D.to(compute) * u_bsi.to(compute)
        return gate(y_bsi, z_bsi, u_bsi.dtype), last_bir
    compute = precision(where, **reals, A=A, B=b, C=c)
    dt_bsi = step_sizes(delta_bsi, delta_bias, delta_softplus, compute)
    # Autocast mixes half and single precision in one call; then everything is widened.
    varying = [x.dtype for x in (b, c) if x.dim() > 2]
    work = u_bsi.dtype if all(dtype == u_bsi.dtype for dtype in varying) else compute
    y_bsi, last_bir = selective_scan(
        u_bsi.to(work),
        dt_bsi,
        A.to(compute),
        b.to(work if b.dim() > 2 else compute),
        c.to(work if c.dim() > 2 else compute),
        None if D is None else D.to(compute),
        impl=impl,
    )
    return gate(y_bsi, z_bsi, u_bsi.dtype), last_bir


def _complex_scan(
    u_bsi: Tensor, dt_bsi: Tensor, a_ir: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence in complex arithmetic, one loop over time."""
    dtype = u_bsi.dtype.to_complex()
    a_ir, b, c = a_ir.to(dtype), b.to(dtype), c.to(dtype)
    channels = u_bsi.shape[2]
    state_bir = torch.zeros(u_bsi.shape[0], *a_ir.shape, dtype=dtype, device=u_bsi.device)
    outputs = []
    for time, (u_bi, dt_bi) in enumerate(zip(u_bsi.unbind(1), dt_bsi.unbind(1), strict=True)):
        decay_bir = torch.exp(dt_bi.unsqueeze(-1) * a_ir)
        input_bir = (dt_bi * u_bi).unsqueeze(-1) * _at(b, time, channels)
        state_bir = decay_bir * state_bir + input_bir
        # States come in conjugate pairs of which one is kept: hence twice the real part.
        outputs.append(2 * (state_bir * _at(c, time, channels)).sum(-1).real)
    return torch.stack(outputs, dim=1), state_bir


def _at(coefficient: Tensor, time: int, channels: int) -> Tensor:
    """Return B or C of one token, broadcastable to (b, i, r)."""
    if coefficient.dim() == 2:
        return coefficient
    now = coefficient[:, time]
    if now.dim() == 2:
        return now.unsqueeze(1)
    return now.repeat_interleave(channels // now.shape[1], 1)
