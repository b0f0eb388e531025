"""The published models as configurations."""

from collections.abc import Callable
from typing import Any

from anymamba.errors import ConfigError
from anymamba.models.config import MambaConfig

__all__ = ["PRESETS", "preset"]

# name: (d_model, layers)
_MAMBA1 = {
    "mamba-130m": (768, 24),
    "mamba-370m": (1024, 48),
    "mamba-790m": (1536, 48),
    "mamba-1.4b": (2048, 48),
    "mamba-2.8b": (2560, 64),
}
_MAMBA2 = {
    "mamba2-130m": (768, 24),
    "mamba2-370m": (1024, 48),
    "mamba2-780m": (1536, 48),
    "mamba2-1.3b": (2048, 48),
    "mamba2-2.7b": (2560, 64),
}
# name: (d_model, layers, MLP width, rank); widths above 187m follow from the parameter counts.
_MAMBA3 = {
    "mamba3-siso-187m": (768, 12, 1536, 1),
    "mamba3-siso-893m": (1536, 24, 3072, 1),
    "mamba3-siso-1.5b": (2048, 24, 4096, 1),
    "mamba3-mimo-187m": (768, 12, 1264, 4),
    "mamba3-mimo-894m": (1536, 24, 2816, 4),
    "mamba3-mimo-1.5b": (2048, 24, 3840, 4),
}


def _mamba1(name: str) -> MambaConfig:
    d_model, layers = _MAMBA1[name]
    return MambaConfig(d_model=d_model, n_layer=layers)


def _mamba2(name: str) -> MambaConfig:
    d_model, layers = _MAMBA2[name]
    return MambaConfig(
        d_model=d_model, n_layer=layers, ssm_cfg={"layer": "Mamba2"}, pad_vocab_size_multiple=16
    )


def _mamba2attn(_: str) -> MambaConfig:
    return MambaConfig(
        d_model=2560,
        n_layer=64,
        ssm_cfg={"layer": "Mamba2"},
        attn_layer_idx=[9, 18, 27, 36, 45, 56],
        attn_cfg={
            "causal": True,
            "d_conv": 4,
            "head_dim": 128,
            "num_heads": 30,
            "out_proj_bias": False,
            "qkv_proj_bias": False,
            "rotary_emb_dim": 64,
        },
        pad_vocab_size_multiple=16,
    )


def _mamba3(name: str) -> MambaConfig:
    d_model, layers, width, rank = _MAMBA3[name]
    options: dict[str, Any] = {
        "layer": "Mamba3",
        "d_state": 128,
        "expand": 2,
        "headdim": 64,
        "ngroups": 1,
        "rope_fraction": 0.5,
        "is_mimo": rank > 1,
        "chunk_size": 64 // rank,
        "is_outproj_norm": False,
    }
    if rank > 1:
        options["mimo_rank"] = rank
    return MambaConfig(
        d_model=d_model,
        d_intermediate=width,
        n_layer=layers,
        vocab_size=128256,
        ssm_cfg=options,
        pad_vocab_size_multiple=16,
        fused_add_norm=rank == 1,
    )


PRESETS: dict[str, Callable[[str], MambaConfig]] = {
    **dict.fromkeys(_MAMBA1, _mamba1),
    **dict.fromkeys(_MAMBA2, _mamba2),
    "mamba2attn-2.7b": _mamba2attn,
    **dict.fromkeys(_MAMBA3, _mamba3),
}


def preset(name: str) -> MambaConfig:
    """Return the configuration of a published model.

    Example:
        >>> preset("mamba3-siso-187m").d_intermediate
        1536
    """
    if name not in PRESETS:
        raise ConfigError(f"preset: unknown model {name!r}. Known: {', '.join(PRESETS)}.")
    return PRESETS[name](name)
