"""The configuration of a stack: its layers, how they are joined, what is inserted, what trains."""

import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

from anymamba.errors import ConfigError
from anymamba.nn.attention import MHA
from anymamba.nn.horizon import cut_of
from anymamba.nn.mamba1 import Mamba
from anymamba.nn.mamba2 import Mamba2
from anymamba.nn.mamba3 import Mamba3
from anymamba.nn.options import nearest
from anymamba.nn.registers import RegisterConfig
from anymamba.nn.residual import ResidualConfig
from anymamba.nn.schedule import MOST_LAYERS, VirtualLayers

__all__ = ["MIXERS", "LayerSpec", "StackConfig", "check_options"]

MIXERS: dict[str, type] = {"Mamba1": Mamba, "Mamba2": Mamba2, "Mamba3": Mamba3}
KINDS: dict[str, type] = {**MIXERS, "MHA": MHA}


class LayerSpec(NamedTuple):
    """The mixer of one layer: its kind and its constructor arguments."""

    kind: str
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Sizes and options of a `Stack`.

    Layers are given in one of two ways: `n_layer` of the family in `ssm_cfg`, with attention at
    `attn_layer_idx`; or `layers`, one entry each: "Mamba1", "Mamba2", "Mamba3" or "MHA", or a
    dictionary with that name under "layer" and arguments of the block beside it. A name alone takes
    its arguments from `ssm_cfg` (if that is its family) or `attn_cfg`.

    Args:
        d_model: width of the stream.
        n_layer: number of real layers; None with `layers`.
        layers: the real layers one by one; None with `n_layer`.
        ssm_cfg: `layer` ("Mamba1" by default) and arguments of that block.
        attn_layer_idx: places of attention layers; with `n_layer` only.
        attn_cfg: arguments of `MHA`.
        d_intermediate: hidden width of the MLP after each mixer; 0 means no MLP.
        rms_norm: RMS norms; else layer norms.
        norm_eps: epsilon of the norms.
        residual_in_fp32: keep the stream in float32 beside half types.
        final_norm: a norm `norm_f` after the last layer.
        virtual: more layers than sets of weights; None runs each layer once.
        residual: how layers are joined.
        registers: learnable rows inserted into the sequence.
        grad_horizon: differentiate only this many virtual layers, from the top; None all.

    Example:
        >>> config = StackConfig(d_model=8, layers=["Mamba3", "MHA"], attn_cfg={"num_heads": 2})
        >>> StackConfig.from_dict(config.to_dict()) == config
        True
    """

    d_model: int
    n_layer: int | None = None
    layers: Sequence[str | dict[str, Any]] | None = None
    ssm_cfg: dict[str, Any] = field(default_factory=dict)
    attn_layer_idx: Sequence[int] = field(default_factory=list)
    attn_cfg: dict[str, Any] = field(default_factory=dict)
    d_intermediate: int = 0
    rms_norm: bool = True
    norm_eps: float = 1e-5
    residual_in_fp32: bool = True
    final_norm: bool = False
    virtual: VirtualLayers | None = None
    residual: ResidualConfig = field(default_factory=ResidualConfig)
    registers: RegisterConfig | None = None
    grad_horizon: int | None = None

    def __post_init__(self) -> None:
        """Check sizes, kinds and options, the schedule, the gates and the registers."""
        # Equal configs stay equal through JSON, which knows lists but no tuples.
        for name in ("layers", "ssm_cfg", "attn_layer_idx", "attn_cfg"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        if self.d_model < 1:
            raise ConfigError(f"StackConfig: d_model must be positive; got {self.d_model}.")
        if self.d_intermediate < 0:
            raise ConfigError(
                f"StackConfig: d_intermediate must not be negative; got {self.d_intermediate}."
            )
        if (self.n_layer is None) == (self.layers is None):
            raise ConfigError("StackConfig: give n_layer or layers, one of them.")
        if self.layers is not None and self.attn_layer_idx:
            raise ConfigError(
                "StackConfig: attn_layer_idx goes with n_layer; in layers write 'MHA' in its place."
            )
        # One spec per distinct layer is enough: most layers of a stack are the same object.
        for spec in {id(spec): spec for spec in self.specs}.values():
            if spec.kind not in KINDS:
                raise ConfigError(
                    f"StackConfig: a layer must be one of {', '.join(KINDS)}; got {spec.kind!r}."
                    f"{nearest(str(spec.kind), KINDS)}"
                )
            check_options("StackConfig", spec.kind, spec.options, KINDS[spec.kind])
        self._check_joints()

    def _check_joints(self) -> None:
        virtual = len(self.schedule)
        cut_of(self.grad_horizon, virtual)
        gates = self.residual.multi_gate
        joined = sum(not self.residual.replaces(place, virtual) for place in range(virtual))
        if gates is not None and not 1 <= gates.n_stream <= joined + 1:
            raise ConfigError(
                f"StackConfig: {joined} layers that keep their input fill at most {joined + 1} "
                f"streams; got n_stream={gates.n_stream}."
            )
        if gates is not None and not joined:
            raise ConfigError("StackConfig: multi_gate needs a layer that keeps its input.")
        for place in self.registers.layers if self.registers else ():
            if not 0 <= place < len(self.specs):
                raise ConfigError(
                    f"StackConfig: registers.layers must lie in 0..{len(self.specs) - 1}; "
                    f"got {place}."
                )

    @cached_property
    def specs(self) -> tuple[LayerSpec, ...]:
        """The mixer of each real layer; layers that are given alike share one spec."""
        if self.layers is not None:
            named = {entry: self._spec(entry) for entry in self.layers if isinstance(entry, str)}
            return tuple(
                named[entry] if isinstance(entry, str) else self._spec(entry)
                for entry in self.layers
            )
        if self.n_layer is None or not 1 <= self.n_layer <= MOST_LAYERS:
            raise ConfigError(
                f"StackConfig: n_layer must lie in 1..{MOST_LAYERS}; got {self.n_layer}."
            )
        for place in self.attn_layer_idx:
            if not 0 <= place < self.n_layer:
                raise ConfigError(
                    f"StackConfig: attn_layer_idx must lie in 0..{self.n_layer - 1}; got {place}."
                )
        mamba, attention = self._spec(self.ssm_cfg.get("layer", "Mamba1")), self._spec("MHA")
        places = frozenset(self.attn_layer_idx)
        return tuple(attention if place in places else mamba for place in range(self.n_layer))

    def _spec(self, entry: str | dict[str, Any]) -> LayerSpec:
        if not isinstance(entry, str):
            if "layer" not in entry:
                raise ConfigError(f"StackConfig: a layer must have a 'layer'; got {entry}.")
            return LayerSpec(entry["layer"], _without_layer(entry))
        if entry == "MHA":
            return LayerSpec(entry, dict(self.attn_cfg))
        is_family = entry == self.ssm_cfg.get("layer", "Mamba1")
        return LayerSpec(entry, _without_layer(self.ssm_cfg) if is_family else {})

    @cached_property
    def schedule(self) -> tuple[int, ...]:
        """The real layer of each virtual layer."""
        real = len(self.specs)
        if real == 0:
            raise ConfigError("StackConfig: there must be a layer; got none.")
        return tuple(range(real)) if self.virtual is None else self.virtual.indices(real)

    @property
    def joined(self) -> tuple[int, ...]:
        """What the residual joins, one after the other: the real layer of each virtual one."""
        return self.schedule

    @cached_property
    def gate_names(self) -> tuple[str | None, ...]:
        """Which set of gates joins each of them; None where there is none."""
        gates, many = self.residual.multi_gate, len(self.joined)
        return tuple(
            None
            if gates is None or self.residual.replaces(place, many)
            else str(place if gates.per_virtual else real)
            for place, real in enumerate(self.joined)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return _plain(asdict(self))

    @classmethod
    def from_dict(cls, entries: dict[str, Any]) -> "StackConfig":
        """Build from the result of `to_dict`; an unknown key is refused."""
        known = [f.name for f in fields(cls)]
        for name in entries:
            if name not in known:
                raise ConfigError(f"StackConfig: unknown key {name!r}.{nearest(name, known)}")
        parts = dict(entries)
        for name, build in _PARTS.items():
            if isinstance(parts.get(name), dict):
                parts[name] = build(parts[name])
        return cls(**parts)


_PARTS = {
    "virtual": lambda entries: VirtualLayers(**entries),
    "residual": ResidualConfig.from_dict,
    "registers": RegisterConfig.from_dict,
}


def _plain(value: Any) -> Any:
    """Return tuples as lists and keys as strings, which is all that JSON knows."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _without_layer(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "layer"}


def check_options(where: str, what: str, options: dict[str, Any], block: type) -> None:
    """Raise `ConfigError` on an option that the block does not have, or on a word for a bool."""
    parameters = inspect.signature(block).parameters
    known = set(parameters) - {"d_model", "embed_dim", "unknown"}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(
                f"{where}: {what}: {block.__name__} has no option {name!r}.{nearest(name, known)}"
            )
        # Python takes every word for true, "false" included.
        if isinstance(parameters[name].default, bool) and isinstance(value, str):
            raise ConfigError(f"{where}: {what}: {name} must be true or false; got {value!r}.")
