"""The fused Mamba-1 block of `mamba_ssm.ops.selective_scan_interface`."""

import torch.nn.functional as F
from torch import Tensor

from anymamba.compat.arguments import precision, require
from anymamba.compat.conv import convolve
from anymamba.compat.selective_scan import as_complex, scan, time_first
from anymamba.errors import ConfigError, ShapeError
from anymamba.notation import Dims, bind_dims
from anymamba.ops import rms_norm

__all__ = ["mamba_inner_fn"]


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """Run a Mamba-1 block between its input projection and its output, both included below.

        x, z = halves of xz            x = silu(causal convolution of x)
        delta, B, C = x_proj x         y = scan(x, delta_proj delta, A, B, C, D, z)
        out = out_proj y + out_proj_bias

    Args:
        xz: the input projection's result (batch, 2 * dim, length).
        conv1d_weight: (dim, 1, width).
        conv1d_bias: (dim,), or None.
        x_proj_weight: (dt_rank + 2 * dstate, dim); a B or C that is given takes no rows.
        delta_proj_weight: (dim, dt_rank).
        out_proj_weight: (d_model, dim).
        out_proj_bias: (d_model,), or None.
        A: decay rates (dim, dstate); real or complex.
        B: input coefficients as in `selective_scan_fn`; None takes them from x.
        C: output coefficients; None takes them from x.
        D: weight of the direct path (dim,).
        delta_bias: added to the step sizes (dim,).
        B_proj_bias: added to the projected B.
        C_proj_bias: added to the projected C.
        delta_softplus: whether softplus follows the step sizes.
        checkpoint_lvl: 0 or 1; accepted. The scan recomputes in its backward either way.
        b_rms_weight: root-mean-square norm of the projected B (dstate,).
        c_rms_weight: the same of C.
        dt_rms_weight: the same of the step sizes after their projection (dim,).
        b_c_dt_rms_eps: inside the roots of these norms.

    Returns:
        (batch, length, d_model); every tensor argument receives a gradient.

    Raises:
        ShapeError: a rank or a size is wrong.
        DtypeError: an argument is no tensor, or float64 meets another precision.
        ConfigError: a norm is asked for beside a complex A or a given coefficient.
    """
    where = "mamba_inner_fn"
    if checkpoint_lvl not in (0, 1):
        raise ConfigError(f"{where}: checkpoint_lvl must be 0 or 1; got {checkpoint_lvl!r}.")
    require(where, xz=xz, conv1d_weight=conv1d_weight, A=A, delta_proj_weight=delta_proj_weight)
    require(where, x_proj_weight=x_proj_weight, out_proj_weight=out_proj_weight)
    dims = bind_dims(
        where,
        A_ir=A,
        conv1d_weight_i1k=conv1d_weight,
        conv1d_bias_i=conv1d_bias,
        delta_proj_weight_it=delta_proj_weight,
        out_proj_weight_di=out_proj_weight,
        out_proj_bias_d=out_proj_bias,
        D_i=D,
        delta_bias_i=delta_bias,
    )
    _check_projections(where, xz, x_proj_weight, A, dims, (B is None) + (C is None))
    precision(
        where, xz=xz, x_proj=x_proj_weight, delta_proj=delta_proj_weight, out_proj=out_proj_weight
    )
    state, rank = dims["r"] * (2 if A.is_complex() else 1), dims["t"]
    x_bis, z_bis = xz.chunk(2, dim=1)
    dims |= bind_dims(where, x_bis=x_bis)
    weight_ik = conv1d_weight.squeeze(1)
    x_bsi = convolve(where, x_bis.transpose(1, 2), weight_ik, conv1d_bias, None, None, "silu").y_bsv
    projected = F.linear(x_bsi, x_proj_weight.to(x_bsi.dtype))
    delta_bsi = F.linear(projected[..., :rank], delta_proj_weight.to(projected.dtype))
    if dt_rms_weight is not None:
        delta_bsi = rms_norm(delta_bsi, dt_rms_weight, eps=b_c_dt_rms_eps)
    b, c = projected[..., rank : rank + state], projected[..., -state:]
    y_bsi, _ = scan(
        where,
        "auto",
        x_bsi,
        delta_bsi,
        A,
        _coefficient(where, "B", b, B, B_proj_bias, b_rms_weight, b_c_dt_rms_eps, A, dims),
        _coefficient(where, "C", c, C, C_proj_bias, c_rms_weight, b_c_dt_rms_eps, A, dims),
        D,
        z_bis.transpose(1, 2),
        delta_bias,
        delta_softplus,
    )
    bias = None if out_proj_bias is None else out_proj_bias.to(y_bsi.dtype)
    return F.linear(y_bsi, out_proj_weight.to(y_bsi.dtype), bias)


def _check_projections(
    where: str, xz: Tensor, x_proj_weight: Tensor, A: Tensor, dims: Dims, projected: int
) -> None:
    """Check the two arguments whose sizes are sums: xz, and the rows of x_proj."""
    if xz.dim() != 3 or xz.shape[1] != 2 * dims["i"]:
        raise ShapeError(
            f"{where}: xz must have shape (batch, {2 * dims['i']}, length), twice the channels "
            f"of A; got {tuple(xz.shape)}."
        )
    rows = dims["t"] + projected * dims["r"] * (2 if A.is_complex() else 1)
    shape = tuple(x_proj_weight.shape)
    if len(shape) != 2 or shape[0] < rows or shape[1] != dims["i"]:
        raise ShapeError(
            f"{where}: x_proj_weight must have shape ({rows}, {dims['i']}) (dt_rank, then B and C "
            f"unless given), or more rows; got {shape}."
        )


def _coefficient(
    where: str,
    name: str,
    projected: Tensor,
    given: Tensor | None,
    bias: Tensor | None,
    rms_weight: Tensor | None,
    eps: float,
    A: Tensor,
    dims: Dims,
) -> Tensor:
    """Return B or C with time before the state axis: the given one, or the projected one."""
    if rms_weight is not None and (given is not None or A.is_complex()):
        raise ConfigError(
            f"{where}: {name.lower()}_rms_weight norms a projected, real {name}; got "
            f"{'a given ' + name if given is not None else 'a complex A'}. Leave the weight out."
        )
    if given is not None:
        return time_first(where, name, given, A.is_complex(), dims)
    if bias is not None:
        if bias.shape != projected.shape[-1:]:
            raise ShapeError(
                f"{where}: {name}_proj_bias must have shape ({projected.shape[-1]},); "
                f"got {tuple(bias.shape)}."
            )
        projected = projected + bias.to(projected.dtype)
    if rms_weight is not None:
        projected = rms_norm(projected, rms_weight, eps=eps)
    return as_complex(projected) if A.is_complex() else projected
