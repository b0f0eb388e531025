"""The configuration of a language model: the official `config.json`, field by field."""

import inspect
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from anymamba.errors import ConfigError
from anymamba.nn import (
    MHA,
    MIXERS,
    Mamba3,
    ResidualConfig,
    StackConfig,
    VirtualLayers,
    check_options,
    nearest,
)

__all__ = ["MIXERS", "MambaConfig"]


@dataclass(frozen=True)
class MambaConfig:
    """Sizes and options of a `MambaLM`; an official `config.json` loads as it is.

    Our own options of the blocks (`a_activation`, `rotation`, ...) live in `ssm_cfg`, beside the
    official ones.

    Args:
        d_model: width of the residual stream.
        d_intermediate: hidden width of the MLP after each mixer; 0 means no MLP.
        n_layer: number of layers.
        vocab_size: number of tokens.
        ssm_cfg: `layer` ("Mamba1" by default, "Mamba2", "Mamba3") and arguments of that block.
        attn_layer_idx: places of attention layers.
        attn_cfg: arguments of `MHA`.
        rms_norm: RMS norms; else layer norms.
        residual_in_fp32: keep the residual stream in float32 beside half types.
        fused_add_norm: accepted for compatibility; steers official kernels only.
        pad_vocab_size_multiple: the embedding has a multiple of this many rows.
        tie_embeddings: the head shares the embedding's weight.
        virtual: more layers than sets of weights; None runs each layer once.
        residual: how layers are joined.
        grad_horizon: differentiate only this many virtual layers, from the top; None all.

    Example:
        >>> MambaConfig(d_model=8, n_layer=1, vocab_size=61).padded_vocab_size
        64
    """

    d_model: int = 2560
    d_intermediate: int = 0
    n_layer: int = 64
    vocab_size: int = 50277
    ssm_cfg: dict[str, Any] = field(default_factory=dict)
    attn_layer_idx: list[int] = field(default_factory=list)
    attn_cfg: dict[str, Any] = field(default_factory=dict)
    rms_norm: bool = True
    residual_in_fp32: bool = True
    fused_add_norm: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True
    virtual: VirtualLayers | None = None
    residual: ResidualConfig = field(default_factory=ResidualConfig)
    grad_horizon: int | None = None

    def __post_init__(self) -> None:
        """Check sizes, the family, the names in both dictionaries and the attention places."""
        for name in ("d_model", "n_layer", "vocab_size", "pad_vocab_size_multiple"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"MambaConfig: {name} must be positive; got {getattr(self, name)}."
                )
        if self.d_intermediate < 0:
            raise ConfigError(
                f"MambaConfig: d_intermediate must not be negative; got {self.d_intermediate}."
            )
        for name in ("rms_norm", "residual_in_fp32", "fused_add_norm", "tie_embeddings"):
            # Python takes every word for true, "false" included.
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"MambaConfig: {name} must be true or false; got {getattr(self, name)!r}."
                )
        if self.layer not in MIXERS:
            raise ConfigError(
                f"MambaConfig: ssm_cfg['layer'] must be one of {sorted(MIXERS)}; "
                f"got {self.layer!r}.{nearest(str(self.layer), MIXERS)}"
            )
        check_options("MambaConfig", "ssm_cfg", self.mixer_options, MIXERS[self.layer])
        check_options("MambaConfig", "attn_cfg", self.attn_cfg, MHA)
        for place in self.attn_layer_idx:
            if not 0 <= place < self.n_layer:
                raise ConfigError(
                    f"MambaConfig: attn_layer_idx must lie in 0..{self.n_layer - 1}; got {place}."
                )
        # Schedule and gates are checked where they are defined. A plain stack has neither, and a
        # hostile file may ask for a billion layers: they must not be spelled out here.
        composed = self.virtual is not None or self.grad_horizon is not None
        if composed or self.residual != ResidualConfig():
            _ = self.stack

    @property
    def layer(self) -> str:
        """The family of the mixers: "Mamba1", "Mamba2" or "Mamba3"."""
        return self.ssm_cfg.get("layer", "Mamba1")

    @property
    def stack(self) -> StackConfig:
        """The stack between embedding and head."""
        return StackConfig(
            d_model=self.d_model,
            n_layer=self.n_layer,
            ssm_cfg=self.ssm_cfg,
            attn_layer_idx=self.attn_layer_idx,
            attn_cfg=self.attn_cfg,
            d_intermediate=self.d_intermediate,
            rms_norm=self.rms_norm,
            residual_in_fp32=self.residual_in_fp32,
            final_norm=True,
            virtual=self.virtual,
            residual=self.residual,
            grad_horizon=self.grad_horizon,
        )

    @property
    def mixer_options(self) -> dict[str, Any]:
        """The arguments of the mixers: `ssm_cfg` without the family."""
        return {name: value for name, value in self.ssm_cfg.items() if name != "layer"}

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary rounded up."""
        multiple = self.pad_vocab_size_multiple
        return -(-self.vocab_size // multiple) * multiple

    @classmethod
    def from_dict(cls, entries: dict[str, Any]) -> "MambaConfig":
        """Build from the content of a `config.json`; an unknown key is refused."""
        known = [f.name for f in fields(cls)]
        if "registers" in entries:
            raise ConfigError(
                "MambaConfig: a language model has no registers: logits belong to tokens, and a "
                "register is none. Use a token of the vocabulary in its place, which is a "
                "learnable row too, or an Encoder, a LatentModel or a Stack."
            )
        for name in entries:
            if name not in known:
                raise ConfigError(f"MambaConfig: unknown key {name!r}.{nearest(name, known)}")
        parts = dict(entries)
        if isinstance(parts.get("virtual"), dict):
            parts["virtual"] = VirtualLayers(**parts["virtual"])
        if isinstance(parts.get("residual"), dict):
            parts["residual"] = ResidualConfig.from_dict(parts["residual"])
        return cls(**parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the official keys; our options of the blocks are in `ssm_cfg`.

        Our own keys (`virtual`, `residual`, `grad_horizon`) are there only where they are used.
        Options that equal the official default are left out, except the activation of A, which no
        official config tells.
        """
        entries = asdict(self)
        unused = {"virtual": None, "residual": ResidualConfig(), "grad_horizon": None}
        for name, default in unused.items():
            if getattr(self, name) == default:
                del entries[name]
        if self.layer == "Mamba3":
            options = dict(entries["ssm_cfg"])
            options.setdefault("a_activation", _defaults(Mamba3)["a_activation"])
            entries["ssm_cfg"] = options
        defaults = _defaults(MIXERS[self.layer])
        entries["ssm_cfg"] = {
            name: value
            for name, value in entries["ssm_cfg"].items()
            if name == "a_activation" or name not in _OURS or value != defaults.get(name)
        }
        return entries


# Options that official constructors do not know.
_OURS = (
    "a_activation",
    "bcdt_rms_eps",
    "bias",
    "dt_limit",
    "learnable_init_state",
    "norm_eps",
    "pathway",
    "rotation",
    "rotation_range",
)


def _defaults(block: type) -> dict[str, Any]:
    return {
        name: parameter.default
        for name, parameter in inspect.signature(block).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
