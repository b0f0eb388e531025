"""Residual kinds: what goes on from layer to layer beside what a layer adds.

The additive kind keeps one stream, x + F_0 + F_1 + ... Multi-gate residuals keep up to n streams
per token, S = [x, F_0, ..., F_{n-2}], and the next layer sees a pool of them:

    score(s, w) = <s, w> / (sqrt(d) rms(s))
    pool(S)     = sum_i softmax_i(score(S_i, w_alpha)) S_i
    fewer than n streams   S' = [S, F]
    n streams              S'_i = S_i + sigmoid(score(S_i, w_beta) + b_beta_i) (F - S_i)
    next layer's input     pool(S')

Streams start as different branches, not as copies of x: copies would have equal gates and equal
gradients for ever. All of it is per token, so a step carries no state beyond the mixers'.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anymamba.errors import ConfigError
from anymamba.nn.horizon import attach
from anymamba.nn.registers import Insertion
from anymamba.nn.stack_layer import Mix
from anymamba.ops import accumulate_dtype

__all__ = [
    "AddStream",
    "GateStream",
    "MultiGate",
    "MultiGateResidual",
    "ResidualConfig",
    "Stream",
    "depth_init_bias",
    "make_gates",
]

EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class MultiGate:
    """Multi-gate residuals instead of the sum.

    Args:
        n_stream: streams per token.
        init_bias: first entry of `b_beta`; see `depth_init_bias`.
        init_bias_step: difference of neighbouring entries of `b_beta`.
        per_virtual: one set of gates per virtual layer; else one per real layer.
    """

    n_stream: int
    init_bias: float = 0.0
    init_bias_step: float = 0.0
    per_virtual: bool = True

    def __post_init__(self) -> None:
        """Check the number of streams."""
        if self.n_stream < 1:
            raise ConfigError(f"MultiGate: n_stream must be positive; got {self.n_stream}.")


@dataclass(frozen=True, kw_only=True)
class ResidualConfig:
    """How layers are joined.

    Args:
        multi_gate: gates and streams; None adds, as official models do.
        skip_first: the first layer's output replaces its input.
        skip_last: the last layer's output replaces its input.
    """

    multi_gate: MultiGate | None = None
    skip_first: bool = False
    skip_last: bool = False

    @classmethod
    def from_dict(cls, entries: dict[str, Any]) -> "ResidualConfig":
        """Build from the plain values that JSON holds."""
        gates = entries.get("multi_gate")
        return cls(**{**entries, "multi_gate": None if gates is None else MultiGate(**gates)})

    def replaces(self, place: int, virtual: int) -> bool:
        """Return whether virtual layer `place` of `virtual` drops its input."""
        return (self.skip_first and place == 0) or (self.skip_last and place == virtual - 1)


def depth_init_bias(mixing_layers: int, n_stream: int) -> float:
    """Return the `init_bias` that suits the number of layers that mix.

    It is -log(sqrt(mixing_layers / 21) (e^3 + 1) - n_stream); of V virtual layers, V - n_stream + 1
    mix.

    Raises:
        ConfigError: too few layers for that many streams.

    Example:
        >>> round(depth_init_bias(13, 4), 4)
        -2.5329
    """
    inside = math.sqrt(max(mixing_layers, 0) / 21) * (math.exp(3) + 1) - n_stream
    if inside <= 0:
        raise ConfigError(
            f"depth_init_bias: {mixing_layers} mixing layers are too few for {n_stream} streams. "
            "Use fewer streams or an init_bias of your own."
        )
    return -math.log(inside)


def make_gates(
    config: MultiGate, names: Sequence[str | None], d_model: int, factory: dict[str, Any]
) -> nn.ModuleDict:
    """Create the gates that some layer uses, each with the parameters it uses.

    Args:
        config: streams and biases.
        names: the gates of each virtual layer; None where a layer has none.
        d_model: width of a stream.
        factory: `device` and `dtype` of the parameters.
    """
    mixes: dict[str, bool] = {}
    streams = 1
    for name in names:
        if name is not None:
            mixes[name] = mixes.get(name, False) or streams == config.n_stream
            streams = min(streams + 1, config.n_stream)
    return nn.ModuleDict(
        {name: MultiGateResidual(config, d_model, yes, **factory) for name, yes in mixes.items()}
    )


class MultiGateResidual(nn.Module):
    """The gates of one layer.

    Parameters that this layer's place in the stack would never use are not created: `w_alpha` when
    there is one stream only, `w_beta` and `b_beta` where streams are only collected.

    Args:
        config: streams and biases.
        d_model: width of a stream.
        mixes: whether the layer ever meets all streams and has to mix.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        config: MultiGate,
        d_model: int,
        mixes: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the queries, zeros, and the biases, a ramp."""
        super().__init__()
        self.n_stream, self.d_model = config.n_stream, d_model
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        if config.n_stream > 1:
            self.w_alpha = nn.Parameter(torch.zeros(d_model, **factory))
        if mixes:
            ramp = [config.init_bias + i * config.init_bias_step for i in range(config.n_stream)]
            self.w_beta = nn.Parameter(torch.zeros(d_model, **factory))
            self.b_beta = nn.Parameter(torch.tensor(ramp, **factory))

    def extra_repr(self) -> str:
        """Name the number of streams."""
        return f"n_stream={self.n_stream}, d_model={self.d_model}"

    def forward(self, branch: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Take in what a layer has added; return the next layer's input and the new streams.

        Args:
            branch: (..., d_model).
            streams: (..., streams so far, d_model).
        """
        added = branch.to(streams.dtype).unsqueeze(-2)
        if streams.shape[-2] < self.n_stream:
            streams = torch.cat([streams, added], dim=-2)
        else:
            bias = self.b_beta.to(streams.dtype)
            gate = torch.sigmoid(_score(streams, self.w_beta) + bias).unsqueeze(-1)
            streams = torch.lerp(streams, added.expand_as(streams), gate.expand_as(streams))
        return self.pool(streams), streams

    def pool(self, streams: Tensor) -> Tensor:
        """Return the weighted mean of the streams."""
        if streams.shape[-2] == 1:
            return streams.squeeze(-2)
        weight = torch.softmax(_score(streams, self.w_alpha), dim=-1)
        return (weight.unsqueeze(-1) * streams).sum(-2)


def _score(streams: Tensor, query: Tensor) -> Tensor:
    scale = torch.rsqrt(streams.square().mean(-1) + EPS) * streams.shape[-1] ** -0.5
    return (streams @ query.to(streams.dtype)) * scale


class AddStream(NamedTuple):
    """The additive kind: the last branch, and the stream it is not yet added to."""

    branch: Tensor
    residual: Tensor | None = None

    def through(
        self, layer: nn.Module, gates: nn.Module | None, cache: Any, mix: Mix, replaces: bool
    ) -> "tuple[AddStream, Any]":
        """Run a layer; return what goes on and the layer's new state."""
        branch, residual, cache = layer(self.branch, self.residual, cache, mix, not replaces)
        return AddStream(branch, residual), cache

    def past(self, gates: nn.Module | None, replaces: bool) -> "AddStream":
        """Go past a layer that no token reaches."""
        return self

    def insert(self, rows: Insertion) -> "AddStream":
        """Insert registers."""
        residual = None if self.residual is None else rows.zeros_into(self.residual)
        return AddStream(rows.into(self.branch), residual)

    def attached(self, source: Tensor) -> "AddStream":
        """Cut what lies below off, and let the gradient of the sum go to `source`."""
        if self.residual is None:
            return AddStream(attach(self.branch, source))
        return AddStream(self.branch.detach(), attach(self.residual, source))


class GateStream(NamedTuple):
    """The multi-gate kind: the next layer's input, and the streams behind it."""

    branch: Tensor
    streams: Tensor

    # The input is no sum of two, so there is nothing for the next norm to add.
    residual = None

    @classmethod
    def of(cls, x: Tensor) -> "GateStream":
        """Start with one stream."""
        return cls(x, x.to(accumulate_dtype(x.dtype)).unsqueeze(-2))

    def through(
        self, layer: nn.Module, gates: nn.Module | None, cache: Any, mix: Mix, replaces: bool
    ) -> "tuple[GateStream, Any]":
        """Run a layer; return what goes on and the layer's new state."""
        branch, _, cache = layer(self.branch, None, cache, mix, False)
        return self._taking(branch, gates, replaces), cache

    def past(self, gates: nn.Module | None, replaces: bool) -> "GateStream":
        """Go past a layer that no token reaches; the number of streams grows all the same."""
        return self._taking(self.branch, gates, replaces)

    def insert(self, rows: Insertion) -> "GateStream":
        """Insert registers into every stream: their pool is then the row itself."""
        return GateStream(rows.into(self.branch), rows.into(self.streams))

    def attached(self, source: Tensor) -> "GateStream":
        """Cut what lies below off, and let the gradient of every stream go to `source`."""
        sources = source.unsqueeze(-2).expand_as(self.streams)
        return GateStream(attach(self.branch, source), attach(self.streams, sources))

    def _taking(self, branch: Tensor, gates: nn.Module | None, replaces: bool) -> "GateStream":
        if replaces or gates is None:
            return GateStream.of(branch)
        pooled, streams = gates(branch, self.streams)
        return GateStream(pooled.to(branch.dtype), streams)


Stream = AddStream | GateStream
