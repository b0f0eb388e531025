"""Layouts: how a checkpoint names its options and tensors, and the way to ours and back.

`official` is the layout of `mamba_ssm`, which is also ours. `transformers` is that of the classes
`MambaForCausalLM`, `Mamba2ForCausalLM` and `FalconMambaForCausalLM`: other names for the options,
one other name among the tensors, and fewer kinds of models.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from anymamba.errors import CheckpointError, ConfigError
from anymamba.models import MambaConfig

__all__ = [
    "LAYOUTS",
    "check_layout",
    "from_transformers",
    "note_groups",
    "official_names",
    "to_transformers",
    "transformers_names",
]

LAYOUTS = ("official", "transformers")

_log = logging.getLogger("anymamba.io")
_log.addHandler(logging.NullHandler())

_CLASSES = {
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
}
# Our option of the block, their name, their default. Their defaults differ between the families.
_COMMON = (
    ("d_conv", "conv_kernel", 4),
    ("dt_min", "time_step_min", 0.001),
    ("dt_max", "time_step_max", 0.1),
    ("dt_init_floor", "time_step_floor", 1e-4),
    ("bias", "use_bias", False),
    ("conv_bias", "use_conv_bias", True),
)
_MAMBA1 = (
    *_COMMON,
    ("d_state", "state_size", 16),
    ("dt_rank", "time_step_rank", "auto"),
    ("dt_scale", "time_step_scale", 1.0),
    ("dt_init", "time_step_init_scheme", "random"),
)
_OPTIONS = {
    "mamba": _MAMBA1,
    "mamba2": (
        *_COMMON,
        ("d_state", "state_size", 128),
        ("headdim", "head_dim", 64),
        ("ngroups", "n_groups", 8),
    ),
    "falcon_mamba": (*_MAMBA1, ("bcdt_rms_eps", "mixer_rms_eps", 1e-6)),
}
# hidden_size, num_hidden_layers, vocab_size, tie_word_embeddings
_SIZES = {
    "mamba": (768, 32, 50280, True),
    "mamba2": (4096, 64, 32768, False),
    "falcon_mamba": (768, 32, 50280, True),
}
_EPS = 1e-5
_CHUNK = 256

_OURS, _THEIRS = "backbone.embedding.weight", "backbone.embeddings.weight"

T = TypeVar("T")


def official_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of a transformers checkpoint under official names.

    Example:
        >>> official_names({"backbone.embeddings.weight": 1, "backbone.norm_f.weight": 2})
        {'backbone.embedding.weight': 1, 'backbone.norm_f.weight': 2}
    """
    return {_OURS if name == _THEIRS else name: value for name, value in tensors.items()}


def transformers_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return entries with official names under the names that transformers has for them."""
    return {_THEIRS if name == _OURS else name: value for name, value in tensors.items()}


def from_transformers(where: str, entries: Mapping[str, Any]) -> MambaConfig:
    """Return the configuration that a transformers `config.json` describes.

    Keys that do not change the mathematics are passed over, as transformers itself does with keys
    it does not know (`norm_before_gate` is one: its gate always comes first).

    Args:
        where: the function that asks; opens every message.
        entries: the content of the file.

    Raises:
        CheckpointError: another family, or an option that our models do not have.

    Example:
        >>> from_transformers("demo", {"model_type": "mamba", "hidden_size": 64}).d_model
        64
    """
    family = entries["model_type"]
    if family not in _CLASSES:
        raise CheckpointError(
            f"{where}: model_type must be one of {', '.join(_CLASSES)}; got {family!r}. "
            "This is a checkpoint of another family."
        )
    d_model, n_layer, vocab_size, tied = _SIZES[family]
    d_model = entries.get("hidden_size", d_model)
    _must(where, entries.get("hidden_act", "silu") in ("silu", "swish"), "hidden_act", "silu")
    eps = entries.get("layer_norm_epsilon", _EPS)
    _must(where, eps == _EPS, "layer_norm_epsilon", f"{_EPS}, the official one")
    options = {ours: entries.get(theirs, default) for ours, theirs, default in _OPTIONS[family]}
    expand = entries.get("expand", 2)
    if family == "mamba2":
        options["layer"] = "Mamba2"
        heads, width = entries.get("num_heads", 128), options["headdim"]
        _must(where, heads * width == expand * d_model, "num_heads * head_dim", "expand * hidden")
        limit = _limits(where, entries.get("time_step_limit", (0.0, math.inf)))
        if limit != (0.0, math.inf):
            options["dt_limit"] = limit
        # transformers always writes its default; our rule for the chunk length is better than it.
        if (chunk := entries.get("chunk_size", _CHUNK)) != _CHUNK:
            options["chunk_size"] = chunk
    elif "intermediate_size" in entries:
        # transformers lets this win: falcon-mamba-7b says expand 16 and means 2.
        expand = entries["intermediate_size"] / d_model
    options["expand"] = int(expand) if expand == int(expand) else expand
    return MambaConfig(
        d_model=d_model,
        n_layer=entries.get("num_hidden_layers", n_layer),
        vocab_size=entries.get("vocab_size", vocab_size),
        ssm_cfg=options,
        residual_in_fp32=entries.get("residual_in_fp32", True),
        pad_vocab_size_multiple=1,
        tie_embeddings=entries.get("tie_word_embeddings", tied),
    )


def to_transformers(where: str, config: MambaConfig) -> dict[str, Any]:
    """Return the transformers `config.json` of a model.

    Padding of the vocabulary is not part of that layout: there `vocab_size` counts all rows. Which
    tokens begin and end a text no official config tells, so they are left empty.

    Args:
        where: the function that asks; opens every message.
        config: the model's configuration.

    Raises:
        CheckpointError: transformers has no such model.
    """
    options = config.mixer_options
    family = _family(where, config)
    expand = options.get("expand", 2)
    _can(where, expand == int(expand), f"expand {expand}, which must be a whole number there")
    entries: dict[str, Any] = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "vocab_size": config.padded_vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layer,
        "expand": int(expand),
        "hidden_act": "silu",
        "layer_norm_epsilon": _EPS,
        "residual_in_fp32": config.residual_in_fp32,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    # Official defaults, where they are not the ones of transformers.
    defaults = {"ngroups": 1}
    for ours, theirs, default in _OPTIONS[family]:
        entries[theirs] = options.get(ours, defaults.get(ours, default))
    inner = int(expand) * config.d_model
    if family == "mamba2":
        entries["num_heads"] = inner // entries["head_dim"]
        entries["chunk_size"] = options.get("chunk_size") or _CHUNK
        limit = tuple(options.get("dt_limit", (0.0, math.inf)))
        if limit != (0.0, math.inf):
            entries["time_step_limit"] = list(limit)
    else:
        entries["intermediate_size"] = inner
        if entries["time_step_rank"] == "auto":
            entries["time_step_rank"] = math.ceil(config.d_model / 16)
    return entries


def check_layout(where: str, layout: str) -> None:
    """Raise unless the layout exists."""
    if layout not in LAYOUTS:
        raise ConfigError(f"{where}: layout must be one of {LAYOUTS}; got {layout!r}.")


def note_groups(where: str, config: MambaConfig, layout: str) -> None:
    """Say once, through logging, where transformers computes something else from the weights."""
    groups = config.mixer_options.get("ngroups", 1)
    if layout == "transformers" and config.layer == "Mamba2" and groups > 1:
        _log.warning(
            "%s: transformers' own path normalises the gated output over the whole width; here, as "
            "in official models and its fused kernel, each of the %d groups is normalised by "
            "itself. Logits differ between the two libraries.",
            where,
            groups,
        )


def _family(where: str, config: MambaConfig) -> str:
    """Return the model type, or say what transformers cannot express."""
    _can(where, config.layer != "Mamba3", "Mamba-3")
    _can(where, config.d_intermediate == 0, "an MLP after each mixer")
    _can(where, not config.attn_layer_idx, "attention layers")
    _can(where, config.rms_norm, "layer norms")
    options = config.mixer_options
    if config.layer == "Mamba1":
        return "mamba" if options.get("bcdt_rms_eps") is None else "falcon_mamba"
    inner = int(options.get("expand", 2) * config.d_model)
    _can(where, options.get("d_ssm") in (None, inner), "a part of the width beside the scan")
    _can(where, not options.get("D_has_hdim"), "a skip weight per channel")
    _can(where, options.get("rmsnorm", True), "a plain gate")
    _can(where, not options.get("norm_before_gate"), "a norm before the gate")
    _can(where, not options.get("learnable_init_state"), "a learnable initial state")
    _can(where, options.get("norm_eps", _EPS) == _EPS, "another eps in the gated norm")
    return "mamba2"


def _limits(where: str, values: Any) -> tuple[float, float]:
    """Return the two numbers of `time_step_limit`."""
    try:
        # transformers 5 writes infinities as {"__float__": "Infinity"}.
        low, high = (float(x["__float__"] if isinstance(x, dict) else x) for x in values)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: time_step_limit must be two numbers; got {values!r}. Correct it."
        ) from error
    return low, high


def _must(where: str, holds: bool, key: str, what: str) -> None:
    if not holds:
        raise CheckpointError(
            f"{where}: {key} must be {what}; it is not. Our models have no other."
        )


def _can(where: str, holds: bool, what: str) -> None:
    if not holds:
        raise CheckpointError(
            f"{where}: the layout 'transformers' must be able to express the model; it has no "
            f"{what}. Use layout='official'."
        )
