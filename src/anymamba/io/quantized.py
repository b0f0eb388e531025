"""Quantised checkpoints: integers and scales beside the ordinary tensors, the scheme in the header.

A quantised layer `NAME` is stored as `NAME.values` (int8, or two int4 in a uint8) and `NAME.scales`
(bfloat16) instead of `NAME.weight`; `anymamba.nn.quantized` describes blocks and panels.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from anymamba.errors import CheckpointError, ConfigError
from anymamba.io.match import own_copy
from anymamba.io.weights_file import WEIGHT_FILES, ValuesOf, shards_of
from anymamba.models import (
    MambaLM,
    outline_quantized,
    quantized_modules,
    scheme_of,
    unlike_layers,
)
from anymamba.nn import SCHEMES, quantize

__all__ = [
    "LAYOUT",
    "LAYOUT_KEY",
    "SCHEME_KEY",
    "expected_tensors",
    "fill_quantized",
    "quantized_outline",
    "quantizing",
    "stored_scheme",
    "whole_scheme",
]

SCHEME_KEY = "anymamba_quantize"
# In which order the integers lie; another text with every change of it.
LAYOUT_KEY, LAYOUT = "anymamba_layout", "panels of 16 rows, 4 columns"
_PARTS = ("values", "scales")


def stored_scheme(where: str, directory: Path) -> str | None:
    """Return the scheme that the header of a checkpoint's weights names, or None.

    Raises:
        CheckpointError: a scheme or a layout that this version does not know.
    """
    file = next((directory / name for name in WEIGHT_FILES if (directory / name).is_file()), None)
    if file is None or ".bin" in file.name:
        return None
    if file.suffix == ".json":
        shards = shards_of(where, file)
        if not shards:
            return None
        file = directory / shards[0]
    notes = _metadata(where, file)
    scheme = notes.get(SCHEME_KEY)
    if scheme is not None and scheme not in SCHEMES:
        raise CheckpointError(
            f"{where}: {str(file)!r} must be quantised as one of {', '.join(SCHEMES)}; its header "
            f"says {scheme!r}. Perhaps a newer version of anymamba wrote it."
        )
    if scheme is not None and (layout := notes.get(LAYOUT_KEY)) != LAYOUT:
        raise CheckpointError(
            f"{where}: the integers of {str(file)!r} must lie in {LAYOUT}; its header says "
            f"{layout!r}. Another version of anymamba wrote it: quantise the original again."
        )
    return scheme


def _metadata(where: str, file: Path) -> Mapping[str, str]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        return {}  # whoever reads the tensors says what is missing
    try:
        with safe_open(os.fspath(file), framework="pt", device="cpu") as reader:
            return reader.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{where}: {str(file)!r} must be a whole weights file; {error}. Use a copy of the "
            "original."
        ) from error


def quantized_outline(
    where: str, model: MambaLM, stored: str | None, wanted: str | None
) -> MambaLM:
    """Give an outline the modules of the scheme that is stored or wanted; none changes nothing.

    Raises:
        ConfigError: another scheme is wanted than is stored.
    """
    if stored is not None and wanted not in (None, stored):
        raise ConfigError(
            f"{where}: quantize={wanted!r} needs floating-point weights; these are {stored} "
            "already. Leave it out, or use the original."
        )
    scheme = stored or wanted
    return model if scheme is None else outline_quantized(model, scheme)


def whole_scheme(where: str, model: MambaLM) -> str | None:
    """Return the scheme of a model that can be stored, or None if it is in floating point.

    Raises:
        CheckpointError: some layers are quantised and others not, or otherwise; or a tied head is
            not the embedding.
    """
    scheme = scheme_of(model)
    if scheme is None:
        return None
    if unlike := unlike_layers(model, scheme):
        (name, kind), count = next(iter(unlike.items())), len(unlike)
        others = "" if count == 1 else f" (and {count - 1} more)"
        raise CheckpointError(
            f"{where}: a quantised model must be what quantize_lm makes, here of {scheme}; {name} "
            f"is a {kind}{others}. Quantise that layer too, with anymamba.nn.QuantizedLinear.of, "
            "or save the model before it is quantised."
        )
    if model.config.tie_embeddings:
        table, head = model.backbone.embedding, model.lm_head
        if not all(torch.equal(getattr(table, x), getattr(head, x)) for x in _PARTS):
            raise CheckpointError(
                f"{where}: lm_head must equal backbone.embedding, because the config ties them; "
                "their integers differ. Use a config with tie_embeddings=False."
            )
    return scheme


def expected_tensors(model: MambaLM, stored: str | None) -> dict[str, Tensor]:
    """Return what must be in a file of `stored` scheme, by name, for a model of any scheme."""
    state = dict(model.state_dict())
    for name, module in quantized_modules(model):
        if stored is None:
            del state[f"{name}.values"], state[f"{name}.scales"]
            shape = (module.rows, module.columns)
            state[f"{name}.weight"] = torch.empty(shape, device="meta", dtype=module.dtype)
        elif model.config.tie_embeddings and name == "lm_head":
            del state[f"{name}.values"], state[f"{name}.scales"]
    return state


def fill_quantized(model: MambaLM, stored: Mapping[str, Tensor], device: torch.device) -> None:
    """Give the quantised layers of an outline their values, quantising what is not yet."""
    for name, module in quantized_modules(model):
        if model.config.tie_embeddings and name == "lm_head":
            continue
        if f"{name}.values" in stored:
            values, scales = stored[f"{name}.values"], stored[f"{name}.scales"]
        else:
            values, scales = quantize(stored[f"{name}.weight"], module.scheme)
        module.values = own_copy(values, device, values.dtype)
        module.scales = own_copy(scales, device, scales.dtype)
    model.tie_weights()


def quantizing(stored: Mapping[str, Tensor], model: MambaLM) -> ValuesOf:
    """Return what quantises the layers of one file, when that file is written.

    Args:
        stored: the floating-point tensors of the whole model, by name.
        model: its outline, quantised.

    Returns:
        A function that takes the tensors of a file, by name, and returns them with values for
        integers and scales, which have none before. Those of one layer may lie in two files: it is
        then quantised twice.
    """
    schemes = {name: module.scheme for name, module in quantized_modules(model)}

    def values_of(outlines: dict[str, Tensor]) -> dict[str, Tensor]:
        out = dict(outlines)
        for name in outlines:
            if out[name].is_meta:
                layer = name.rpartition(".")[0]
                made = quantize(stored[f"{layer}.weight"], schemes[layer])
                both = zip((f"{layer}.values", f"{layer}.scales"), made, strict=True)
                out.update((part, tensor) for part, tensor in both if part in outlines)
        return out

    return values_of
