"""Each block as a layer of the decoder's program."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.models.decoder.weights import NotServed, Weights
from anymamba.nn import (
    MHA,
    GatedMLP,
    Layer,
    Mamba,
    Mamba2,
    Mamba3,
    RMSNorm,
    RMSNormGated,
    Rotation,
)
from anymamba.ops import decode, div_eps

__all__ = ["layer_of"]


def layer_of(
    weights: Weights, layers: nn.ModuleList, place: int, width: int
) -> tuple[decode.Layer, nn.Module]:
    """Return one layer of the program, of a model of this width, and its mixer."""
    layer = weights.module(layers, str(place), Layer)
    mixer = weights.module(layer, "mixer", *_FAMILIES)
    out = decode.Layer(rates_eps=-1.0, dt_high=math.inf)
    out.norm = weights.norm(layer, "norm", width)
    out.out_proj = weights.matrix(mixer, "out_proj", width, mixer.d_inner)
    _FAMILIES[type(mixer)](weights, mixer, out, width)
    if layer.has_mlp:
        out.norm2 = weights.norm(layer, "norm2", width)
        mlp = weights.module(layer, "mlp", GatedMLP)
        out.fc1 = weights.matrix(mlp, "fc1", None, width)
        out.fc2 = weights.matrix(mlp, "fc2", width, out.fc1.rows // 2)
    return out, mixer


def _convolution(weights: Weights, mixer: Any, out: decode.Layer, channels: int) -> None:
    conv = weights.module(mixer, "conv1d", nn.Conv1d)
    out.conv_weight = weights.vector(conv, "weight", (channels, 1, mixer.d_conv))
    out.conv_bias = weights.vector(conv, "bias", (channels,), is_optional=True)
    out.conv_width = mixer.d_conv


def _gate_norm(weights: Weights, mixer: Any, out: decode.Layer, width: int) -> None:
    norm = weights.module(mixer, "norm", RMSNormGated)
    out.gate_norm = decode.Norm(
        weight=weights.vector(norm, "weight", (width,)),
        eps=weights.option(norm, "eps"),
        kind=decode.NormKind.RMS,
    )
    out.gate_group = group = weights.option(norm, "group_size") or width
    out.norm_before_gate = weights.option(norm, "norm_before_gate")
    if group < 1 or width % group:
        raise NotServed(f"group_size of RMSNormGated must divide {width}, and is {group}")


def _mamba1(weights: Weights, mixer: Mamba, out: decode.Layer, width: int) -> None:
    inner, states, rank = mixer.d_inner, mixer.d_state, mixer.dt_rank
    out.family, out.inner, out.state, out.dt_rank = 1, inner, states, rank
    out.in_proj = weights.matrix(mixer, "in_proj", 2 * inner, width)
    _convolution(weights, mixer, out, inner)
    out.x_proj = weights.matrix(mixer, "x_proj", rank + 2 * states, inner)
    step = weights.module(mixer, "dt_proj", nn.Linear)
    out.dt_weight = weights.vector(step, "weight", (inner, rank), _grouped)
    out.dt_bias = weights.vector(step, "bias", (inner,))
    # exp(dt A) is a power of two of this.
    out.a = weights.vector(
        mixer, "A_log", (inner, states), lambda a_log: -a_log.exp() / math.log(2)
    )
    out.skip = weights.vector(mixer, "D", (inner,))
    if (eps := weights.option(mixer, "bcdt_rms_eps")) is not None:
        out.rates_eps = eps


def _grouped(weight: Tensor) -> Tensor:
    """Return (channels, rank) as (groups, rank, channels of a group), zeros in the last group."""
    padded = F.pad(weight, (0, 0, 0, -weight.shape[0] % decode.GROUP))
    return padded.unflatten(0, (-1, decode.GROUP)).transpose(1, 2)


def _mamba2(weights: Weights, mixer: Mamba2, out: decode.Layer, width: int) -> None:
    out.family, out.inner, out.state = 2, mixer.d_inner, mixer.d_state
    out.heads, out.headdim, out.groups = mixer.nheads, mixer.headdim, mixer.ngroups
    out.mlp, out.has_skip_per_channel = mixer.d_mlp, mixer.D_has_hdim
    out.dt_low, out.dt_high = weights.option(mixer, "dt_limit")
    rows = 2 * mixer.d_mlp + mixer.d_ssm + mixer.conv_dim + mixer.nheads
    out.in_proj = weights.matrix(mixer, "in_proj", rows, width)
    _convolution(weights, mixer, out, mixer.conv_dim)
    heads = (mixer.nheads,)
    out.a = weights.vector(mixer, "A_log", heads, lambda a_log: -a_log.exp())
    out.skip = weights.vector(mixer, "D", (mixer.d_ssm,) if mixer.D_has_hdim else heads)
    out.dt_bias = weights.vector(mixer, "dt_bias", heads)
    if weights.option(mixer, "rmsnorm"):
        _gate_norm(weights, mixer, out, mixer.d_ssm)


def _mamba3(weights: Weights, mixer: Mamba3, out: decode.Layer, width: int) -> None:
    out.family, out.inner, out.state = 3, mixer.d_inner, mixer.d_state
    out.heads, out.headdim, out.groups = mixer.nheads, mixer.headdim, mixer.ngroups
    out.rank, out.a_floor = mixer.mimo_rank, weights.option(mixer, "A_floor")
    out.is_heavy_tail = weights.option(mixer, "a_activation") == "heavy_tail"
    if (dt_limit := weights.option(mixer, "dt_limit")) is not None:
        out.dt_low, out.dt_high = dt_limit
    out.in_proj = weights.matrix(mixer, "in_proj", sum(mixer.split_sizes), width)
    heads, states = (mixer.nheads,), (mixer.d_state,)
    out.skip = weights.vector(mixer, "D", heads)
    out.dt_bias = weights.vector(mixer, "dt_bias", heads)
    keys = (mixer.nheads, mixer.mimo_rank, mixer.d_state)
    for name in ("B", "C"):
        norm = weights.module(mixer, f"{name}_norm", RMSNorm)
        setattr(out, f"{name.lower()}_norm", weights.vector(norm, "weight", states))
        setattr(out, f"{name.lower()}_eps", weights.option(norm, "eps"))
        setattr(out, f"{name.lower()}_bias", weights.vector(mixer, f"{name}_bias", keys))
    if mixer.is_mimo:
        values = (mixer.nheads, mixer.mimo_rank, mixer.headdim)
        for name in ("mimo_x", "mimo_z", "mimo_o"):
            setattr(out, name, weights.vector(mixer, name, values))
    if weights.option(mixer, "is_outproj_norm"):
        _gate_norm(weights, mixer, out, mixer.d_inner)
        # The kernel finishes one head after the other, whatever the two fields say.
        if out.gate_group != mixer.headdim or not out.norm_before_gate:
            raise NotServed(
                f"the gated norm of Mamba3 must have group_size={mixer.headdim}, a head, and "
                "norm_before_gate=True"
            )
    _rotation(weights, mixer, out)


def _rotation(weights: Weights, mixer: Mamba3, out: decode.Layer) -> None:
    turn = weights.option(mixer, "rotation")
    if type(turn) is not Rotation:
        raise NotServed(f"the rotation is a {type(turn).__name__}, which may turn by other rules")
    is_complex = weights.option(turn, "kind") == "complex"
    pairing = weights.option(turn, "pairing")
    out.rotation = decode.RotationKind[pairing.upper() if is_complex else "QUATERNION"]
    out.turns = weights.option(turn, "angles" if is_complex else "blocks")
    channels = out.turns if is_complex else 3 * mixer.nheads * out.turns
    if channels != mixer.split_sizes[-1]:
        raise NotServed(
            f"there must be {mixer.split_sizes[-1]} channels of the rotation, and it has {channels}"
        )
    out.is_turned = weights.option(turn, "width") > 0
    out.turn_scale = weights.option(turn, "range") * math.pi
    out.turn_floor = div_eps(torch.float32)


def _attention(weights: Weights, mixer: MHA, out: decode.Layer, width: int) -> None:
    if not weights.option(mixer, "causal"):
        raise NotServed("attention must be causal")
    out.family, out.heads, out.headdim = 0, mixer.num_heads, mixer.head_dim
    out.groups, out.mlp = mixer.num_heads_kv, mixer.mlp_dim // 2
    out.in_proj = weights.matrix(mixer, "in_proj", mixer.qkv_dim + mixer.mlp_dim, width)
    if mixer.d_conv > 0:
        _convolution(weights, mixer, out, mixer.qkv_dim)
    scale = weights.option(mixer, "softmax_scale")
    out.score_scale = mixer.head_dim**-0.5 if scale is None else scale
    out.turns = weights.option(mixer, "rotary_emb_dim") // 2
    out.rotation = decode.RotationKind[weights.option(mixer, "pairing").upper()]
    weights.option(mixer, "rotary_emb_base")
    out.a = weights.constant(mixer.rotary_rates(torch.float32, "cpu"))


_FAMILIES: dict[type[nn.Module], Callable[..., None]] = {
    Mamba: _mamba1,
    Mamba2: _mamba2,
    Mamba3: _mamba3,
    MHA: _attention,
}
