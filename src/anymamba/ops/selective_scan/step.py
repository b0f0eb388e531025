"""One token of the selective scan: what decoding runs."""

from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.errors import ConfigError, DtypeError, ShapeError
from anymamba.notation import Dims, bind_dims
from anymamba.ops.checks import check_floats, guard

__all__ = ["ScanStep", "selective_scan_step"]


class ScanStep(NamedTuple):
    """What one step returns."""

    y_bi: Tensor  # output, in the dtype of the input
    state_bir: Tensor  # state after the token, in the dtype of accumulation


def selective_scan_step(
    u_bi: Tensor,
    dt_bi: Tensor,
    a_ir: Tensor,
    b: Tensor,
    c: Tensor,
    skip_i: Tensor | None,
    state_bir: Tensor,
) -> ScanStep:
    """Advance the state by one token; pure and differentiable.

        h' = exp(dt A) h + (dt u) B            y = sum over r of C h' + skip u

    Args:
        u_bi: input.
        dt_bi: step size after softplus; positive.
        a_ir: decay rates.
        b: constant `(i, r)`, per row `(b, r)` or grouped `(b, g, r)`. Where b = i, two axes are
            read as `(b, r)`; write a constant as `(b, i, r)` then.
        c: output coefficients, in any of the same forms.
        skip_i: weight of the direct path from u to y, or None.
        state_bir: state before the token.

    Returns:
        The output and the new state.

    Raises:
        ShapeError: a rank is wrong or sizes disagree.
        DtypeError: an argument is no tensor, not floating point, or of a mixed dtype.
        DeviceError: arguments live on different devices.
        ConfigError: groups do not divide the channels.

    Example:
        >>> one = torch.ones(1, 1)
        >>> selective_scan_step(one, one, 0 * one, one, one, None, torch.ones(1, 1, 1)).y_bi
        tensor([[2.]])
    """
    where = "selective_scan_step"
    dims = bind_dims(where, u_bi=u_bi, dt_bi=dt_bi, a_ir=a_ir, skip_i=skip_i, state_bir=state_bir)
    b_bir, c_bir = _per_channel(where, "b", b, dims), _per_channel(where, "c", c, dims)
    coefficients = {"b": b, "c": c}
    constant = {name: x for name, x in coefficients.items() if _is_constant(x, dims)}
    compute = check_floats(
        where,
        {"u_bi": u_bi, **{name: x for name, x in coefficients.items() if name not in constant}},
        {"dt_bi": dt_bi, "a_ir": a_ir, "skip_i": skip_i, "state_bir": state_bir, **constant},
    )
    guard(where, u_bi=u_bi, dt_bi=dt_bi, a_ir=a_ir, b=b, c=c, skip_i=skip_i, state_bir=state_bir)
    wide_bi, dt_bi = u_bi.to(compute), dt_bi.to(compute)
    decay_bir = torch.exp(dt_bi[..., None] * a_ir.to(compute))
    input_bir = (dt_bi * wide_bi)[..., None] * b_bir.to(compute)
    state_bir = torch.addcmul(input_bir, decay_bir, state_bir.to(compute))
    y_bi = (state_bir * c_bir.to(compute)).sum(-1)
    if skip_i is not None:
        y_bi = y_bi + skip_i.to(compute) * wide_bi
    y_bi = y_bi.to(u_bi.dtype)
    guard(where, y_bi=y_bi, state_bir=state_bir)
    return ScanStep(y_bi, state_bir)


def _is_constant(coefficient: Tensor, dims: Dims) -> bool:
    return coefficient.dim() == 2 and coefficient.shape[0] != dims["b"]


def _per_channel(where: str, name: str, coefficient: Tensor, dims: Dims) -> Tensor:
    """Check B or C and make it broadcastable to (b, i, r)."""
    if not isinstance(coefficient, Tensor):
        given = type(coefficient).__name__
        raise DtypeError(f"{where}: {name} must be a tensor; got {given}.")
    shape = tuple(coefficient.shape)
    batch, channels, states = dims["b"], dims["i"], dims["r"]
    if shape == (batch, states):
        return coefficient[:, None]
    if shape == (channels, states):
        return coefficient
    if len(shape) != 3 or shape[0] != batch or shape[2] != states or shape[1] == 0:
        raise ShapeError(
            f"{where}: {name} must have shape ({channels}, {states}), ({batch}, {states}) or "
            f"({batch}, groups, {states}); got {shape}."
        )
    if channels % shape[1]:
        raise ConfigError(
            f"{where}: the groups of {name} must divide the inner width {channels}; got {shape[1]}."
        )
    return coefficient.repeat_interleave(channels // shape[1], 1)
