"""The hybrid recipe: mostly Mamba-3, now and then attention, which looks things up exactly."""

from typing import Any

from anymamba.errors import ConfigError
from anymamba.models.config import MambaConfig

__all__ = ["hybrid_config"]


def hybrid_config(
    d_model: int,
    n_layer: int,
    *,
    mamba_per_attention: int = 5,
    head_dim: int = 64,
    num_heads_kv: int | None = None,
    ssm_cfg: dict[str, Any] | None = None,
    **options: Any,
) -> MambaConfig:
    """Return a language model of groups: `mamba_per_attention` Mamba-3 layers, then one attention.

    Five to one, and attention without positions, is the mixture of the Mamba-3 paper's retrieval
    models: the recurrent layers know the order, attention only has to find.

    Args:
        d_model: width of the residual stream; a multiple of `head_dim`.
        n_layer: all layers; a last group may be short of its attention.
        mamba_per_attention: Mamba-3 layers before each attention layer.
        head_dim: width of an attention head.
        num_heads_kv: key and value heads; as many as query heads if None.
        ssm_cfg: arguments of the Mamba-3 blocks.
        **options: further fields of `MambaConfig`, such as `vocab_size` and `d_intermediate`.

    Raises:
        ConfigError: no layer would be attention, or the widths do not fit.

    Example:
        >>> hybrid_config(128, 12, vocab_size=256).attn_layer_idx
        [5, 11]
    """
    if mamba_per_attention < 1:
        raise ConfigError(
            f"hybrid_config: mamba_per_attention must be positive; got {mamba_per_attention}."
        )
    if d_model % head_dim:
        raise ConfigError(f"hybrid_config: head_dim must divide d_model {d_model}; got {head_dim}.")
    places = list(range(mamba_per_attention, n_layer, mamba_per_attention + 1))
    if not places:
        raise ConfigError(
            f"hybrid_config: n_layer must be at least {mamba_per_attention + 1}, one group; got "
            f"{n_layer}. Without attention use MambaConfig."
        )
    attention = {
        "causal": True,
        "num_heads": d_model // head_dim,
        "num_heads_kv": num_heads_kv,
        "head_dim": head_dim,
        "qkv_proj_bias": False,
        "out_proj_bias": False,
        "rotary_emb_dim": 0,
    }
    return MambaConfig(
        d_model=d_model,
        n_layer=n_layer,
        ssm_cfg={**(ssm_cfg or {}), "layer": "Mamba3"},
        attn_layer_idx=places,
        attn_cfg=attention,
        **options,
    )
