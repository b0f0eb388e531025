"""`config.json` and `anymamba.json`: what the files beside the weights say.

`config.json` has the keys of its layout and nothing else. `anymamba.json` is ours: which version
wrote the checkpoint, the activation of A, and, beside a transformers config, the official config
it was made from, which has more in it.
"""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from anymamba.errors import AnyMambaError, CheckpointError, ConfigError
from anymamba.io.disk import read_json, write_json
from anymamba.io.layouts import from_transformers, to_transformers
from anymamba.models import MambaConfig
from anymamba.version import __version__

__all__ = ["NOTES", "Description", "choose_activation", "describe", "read_config", "write_config"]

NOTES = "anymamba.json"
_FORMAT = 1
_ACTIVATIONS = ("heavy_tail", "softplus")
# What a value of a wrong type or size raises somewhere in a config or a constructor: a list where
# a number should be, null where a table should be, infinity as a width.
WRONG_VALUES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class Description(NamedTuple):
    """What `config.json` says: the model, and in which layout."""

    config: MambaConfig
    layout: str


def read_config(directory: str | Path) -> MambaConfig:
    """Return the configuration of a checkpoint, official or transformers.

    Args:
        directory: a folder with a `config.json`.

    Raises:
        CheckpointError: the file is missing, damaged, or describes no model of ours; an unknown
            key of an official config is named, with the nearest known one.
    """
    return describe("read_config", Path(directory)).config


def describe(where: str, directory: Path) -> Description:
    """Return configuration and layout of a checkpoint."""
    file = directory / "config.json"
    entries = read_json(where, file)
    if "anymamba_model" in entries:
        kind = entries["anymamba_model"]
        raise CheckpointError(
            f"{where}: {str(file)!r} must describe a language model; it describes a {kind}. "
            f"Use {kind}.from_pretrained, or anymamba.io.load_model."
        )
    try:
        if "model_type" in entries:
            config = from_transformers(f"{where}: {str(file)!r}", entries)
            return Description(_richer(where, directory, entries) or config, "transformers")
        return Description(MambaConfig.from_dict(entries), "official")
    except CheckpointError:
        raise
    except (AnyMambaError, *WRONG_VALUES) as error:
        raise CheckpointError(
            f"{where}: {str(file)!r} must describe a model; {error} Correct it, or use a copy."
        ) from error


def choose_activation(
    where: str, directory: Path, config: MambaConfig, a_activation: str | None
) -> MambaConfig:
    """Return the config with the activation of A decided: as given, as stored, or heavy_tail.

    Official configs do not tell which one a Mamba-3 model was trained with; it changed upstream in
    June 2026. So the last choice is announced.

    Raises:
        ConfigError: the activation is unknown, or the model is no Mamba-3.
    """
    if config.layer != "Mamba3":
        if a_activation is not None:
            raise ConfigError(
                f"{where}: a_activation belongs to Mamba-3; this is a {config.layer} model. "
                "Leave it out."
            )
        return config
    if a_activation is not None and a_activation not in _ACTIVATIONS:
        raise ConfigError(
            f"{where}: a_activation must be one of {_ACTIVATIONS}; got {a_activation!r}."
        )
    if a_activation is None:
        if "a_activation" in config.ssm_cfg:
            return config
        a_activation = "heavy_tail"
        warnings.warn(
            f"{where}: {directory} does not say which activation of A this Mamba-3 model was "
            "trained with; heavy_tail is assumed, as official code does since June 2026. For older "
            "weights pass a_activation='softplus'; `anymamba inspect MODEL --text FILE` tells "
            "which one they want.",
            stacklevel=2,
        )
    return replace(config, ssm_cfg={**config.ssm_cfg, "a_activation": a_activation})


def write_config(
    where: str, directory: Path, config: MambaConfig, layout: str, tokens: dict[str, Any]
) -> None:
    """Write `anymamba.json`, then `config.json`.

    Args:
        where: the function that asks; opens every message.
        directory: an existing folder.
        config: of the model.
        layout: "official" or "transformers".
        tokens: special token ids for a transformers config.
    """
    official = config.to_dict()
    notes: dict[str, Any] = {"format": _FORMAT, "version": __version__, "layout": layout}
    if config.layer == "Mamba3":
        notes["a_activation"] = official["ssm_cfg"]["a_activation"]
    if layout == "transformers":
        notes["config"] = official
    entries = official if layout == "official" else to_transformers(where, config) | tokens
    write_json(where, directory / NOTES, notes)
    write_json(where, directory / "config.json", entries)


def _richer(where: str, directory: Path, entries: dict[str, Any]) -> MambaConfig | None:
    """Return the official config in our notes, if it is still the source of `config.json`."""
    if not (directory / NOTES).is_file():
        return None
    try:
        config = MambaConfig.from_dict(read_json(where, directory / NOTES)["config"])
        told = to_transformers(where, config)
    except (AnyMambaError, *WRONG_VALUES):
        # The notes are an extra: config.json is complete without them.
        return None
    changing = ("architectures", "bos_token_id", "eos_token_id", "pad_token_id")
    same = all(entries.get(key) == value for key, value in told.items() if key not in changing)
    return config if same else None
