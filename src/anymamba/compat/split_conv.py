"""The fused Mamba-2 block of `mamba_ssm.ops.triton.ssd_combined`."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.compat.arguments import gate, precision, require
from anymamba.compat.conv import convolve
from anymamba.compat.norm_gated import rmsnorm_fn
from anymamba.compat.ssd import NO_LIMIT, ScanTensors, check_state_dtype, scan
from anymamba.errors import ConfigError, ShapeError
from anymamba.notation import bind_dims

__all__ = ["SplitScan", "mamba_split_conv1d_scan_combined", "split_conv_scan"]


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a Mamba-2 block after its input projection: split, convolve, scan, norm, project.

    Args:
        zxbcdt: the input projection's result (batch, length, 2 * d_mlp + 2 * dim +
            2 * ngroups * dstate + nheads) in the order z0, x0, z, x, B, C, dt, where
            dim = nheads * headdim and d_mlp, often 0, is what the other sizes leave over.
        conv1d_weight: (dim + 2 * ngroups * dstate, width).
        conv1d_bias: (dim + 2 * ngroups * dstate,), or None.
        dt_bias: (nheads,).
        A: decay rates (nheads,); negative.
        D: weight of the direct path (nheads,) or (nheads, headdim).
        chunk_size: positive; accepted, see `mamba_chunk_scan_combined`.
        initial_states: (batch, nheads, headdim, dstate).
        seq_idx: sequence of each token (batch, length); restarts state and convolution.
        dt_limit: (low, high) for the step sizes after softplus.
        return_final_states: return the state after the last token too.
        activation: of the convolution: None, "silu" or "swish".
        rmsnorm_weight: (dim,); gated root-mean-square norm over groups of dim / ngroups. None
            means a plain gate.
        rmsnorm_eps: inside its root.
        outproj_weight: (d_out, d_mlp + dim), or None.
        outproj_bias: (d_out,); only beside a weight.
        headdim: needed when D has one axis.
        ngroups: groups of B and C.
        norm_before_gate: the order of norm and gate.
        state_dtype: accepted; states are always accumulated in float32 or wider.

    Returns:
        (batch, length, d_out), or d_mlp + dim without projection; with the final states if asked.

    Raises:
        ShapeError: a rank or a size is wrong.
        DtypeError: an argument is no tensor, or float64 meets another precision.
        ConfigError: an option is out of range, missing, or contradicts another.
        PackingError: `seq_idx` does not fit.
    """
    where = "mamba_split_conv1d_scan_combined"
    check_state_dtype(where, state_dtype)
    if outproj_bias is not None and outproj_weight is None:
        raise ConfigError(f"{where}: outproj_bias needs outproj_weight; got none.")
    parts = split_conv_scan(
        where,
        *(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size),
        *(initial_states, seq_idx, dt_limit, activation, headdim, ngroups),
    )
    if rmsnorm_weight is None:
        out = gate(parts.y_bsi, parts.z_bsi, zxbcdt.dtype)
    else:
        size = parts.y_bsi.shape[-1] // ngroups
        out = rmsnorm_fn(
            *(parts.y_bsi, rmsnorm_weight, None, parts.z_bsi, rmsnorm_eps, size, norm_before_gate)
        )
    if parts.mlp.shape[-1]:
        value, mlp_gate = parts.mlp.chunk(2, dim=-1)[::-1]
        out = torch.cat([gate(value, mlp_gate, out.dtype), out], dim=-1)
    if outproj_weight is not None:
        out = _project(where, out, outproj_weight, outproj_bias)
    return (out, parts.final_bhpr) if return_final_states else out


def _project(where: str, out: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    precision(where, out=out, outproj_weight=weight, outproj_bias=bias)
    if weight.dim() != 2 or weight.shape[1] != out.shape[-1]:
        raise ShapeError(
            f"{where}: outproj_weight must have shape (d_out, {out.shape[-1]}); "
            f"got {tuple(weight.shape)}."
        )
    return F.linear(out, weight.to(out.dtype), None if bias is None else bias.to(out.dtype))


class SplitScan(NamedTuple):
    """What a Mamba-2 block has before its norm: outputs, gate, the MLP part, final states."""

    y_bsi: Tensor
    z_bsi: Tensor
    mlp: Tensor
    final_bhpr: Tensor


def split_conv_scan(
    where: str,
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    dt_limit: tuple[float, float],
    activation: str | None,
    headdim: int | None,
    ngroups: int,
    every_state: Tensor | None = None,
) -> SplitScan:
    """Split a projected input, convolve x, B and C, and scan.

    The arguments are those above; `every_state` (nheads, headdim, dstate) seeds every sequence.
    """
    require(where, zxbcdt=zxbcdt, conv1d_weight=conv1d_weight, dt_bias=dt_bias, A=A, D=D)
    if D.dim() not in (1, 2):
        raise ShapeError(
            f"{where}: D must have the axes (nheads,) or (nheads, headdim); "
            f"got shape {tuple(D.shape)}."
        )
    width = D.shape[1] if D.dim() == 2 else headdim
    if width is None:
        raise ConfigError(f"{where}: headdim must be given when D has one axis; got None.")
    heads = D.shape[0]
    inner = heads * width
    channels = bind_dims(where, conv1d_weight_vk=conv1d_weight, conv1d_bias_v=conv1d_bias)["v"]
    if ngroups < 1 or heads % ngroups or channels <= inner or (channels - inner) % (2 * ngroups):
        raise ConfigError(
            f"{where}: conv1d_weight must have nheads * headdim + 2 * ngroups * dstate rows and "
            f"ngroups must divide nheads; got {channels} rows for nheads={heads}, "
            f"headdim={width}, ngroups={ngroups}."
        )
    rest = zxbcdt.shape[-1] - inner - channels - heads
    if zxbcdt.dim() != 3 or rest < 0 or rest % 2:
        raise ShapeError(
            f"{where}: zxbcdt must have shape (batch, length, {inner + channels + heads} or an "
            f"even number more); got {tuple(zxbcdt.shape)}."
        )
    mlp, z_bsi, xbc_bsv, dt_bsh = zxbcdt.split([rest, inner, channels, heads], dim=-1)
    xbc_bsv = convolve(where, xbc_bsv, conv1d_weight, conv1d_bias, seq_idx, None, activation).y_bsv
    side = (channels - inner) // 2
    x_bsi, b, c = xbc_bsv.split([inner, side, side], dim=-1)
    tensors = ScanTensors(
        x_bsi.unflatten(-1, (heads, width)),
        dt_bsh,
        A,
        b.unflatten(-1, (ngroups, -1)),
        c.unflatten(-1, (ngroups, -1)),
        D,
        None,
        dt_bias,
        initial_states,
        every_state,
    )
    y_bshp, final_bhpr, _ = scan(where, tensors, chunk_size, True, dt_limit, seq_idx, None)
    return SplitScan(y_bshp.flatten(2), z_bsi, mlp, final_bhpr)
