"""Quantising a language model: projections, embedding and head become integers."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from anymamba.errors import ConfigError
from anymamba.models.lm import MambaLM
from anymamba.nn import QuantizedEmbedding, QuantizedLinear, is_plain

__all__ = [
    "outline_quantized",
    "quantize_lm",
    "quantized_modules",
    "scheme_of",
    "unlike_layers",
]

# What stays floating point: norms, biases, convolutions, A, D, and the step size with its small
# projection, which reaches every decay.
_PROJECTIONS = ("in_proj", "out_proj", "x_proj", "fc1", "fc2")


def scheme_of(lm: MambaLM) -> str | None:
    """Return the scheme of a model's quantised layers, of the first if they differ, or None.

    Layers may have been replaced since the model was quantised; see `unlike_layers`.
    """
    return next((module.scheme for _, module in quantized_modules(lm)), None)


def unlike_layers(lm: MambaLM, scheme: str) -> dict[str, str]:
    """Return the layers that are not what `quantize_lm` makes of them.

    Args:
        lm: a model, quantised as a whole or in parts.
        scheme: "int8" or "int4".

    Returns:
        What stands there, by dotted name.

    Example:
        >>> from anymamba.models import MambaConfig
        >>> lm = quantize_lm(MambaLM(MambaConfig(d_model=32, n_layer=1, vocab_size=16)), "int8")
        >>> lm.lm_head = nn.Linear(32, 16)
        >>> unlike_layers(lm, "int8")
        {'lm_head': 'Linear'}
    """
    usual: set[Any] = {parent._modules[name] for parent, name in _places(lm)}
    quantized = {module for _, module in quantized_modules(lm)}
    alike = {module for module in quantized if module in usual and module.scheme == scheme}
    unlike = (usual | quantized) - alike
    return {name: _kind(module) for name, module in lm.named_modules() if module in unlike}


def _kind(module: nn.Module) -> str:
    kind = type(module).__name__
    is_quantized = isinstance(module, QuantizedLinear | QuantizedEmbedding)
    return f"{kind} of {module.scheme}" if is_quantized else kind


def quantize_lm(lm: MambaLM, scheme: str) -> MambaLM:
    """Quantise a model in place, for inference; returns the model.

    Projections, embedding and head become int8 or int4 in blocks of 32 with a bfloat16 scale each
    (8.5 or 4.5 bits per weight); the rest stays as it is. A tied head stays tied.

    Args:
        lm: a model in floating point; no part that would be quantised may be swapped or hooked.
        scheme: "int8" or "int4".

    Raises:
        ConfigError: an unknown scheme, or a model that is quantised already.

    Example:
        >>> from anymamba.models import MambaConfig
        >>> lm = quantize_lm(MambaLM(MambaConfig(d_model=32, n_layer=1, vocab_size=16)), "int8")
        >>> scheme_of(lm), lm.lm_head.weight.shape
        ('int8', torch.Size([16, 32]))
    """
    return _replace(lm, scheme, is_outline=False)


def outline_quantized(lm: MambaLM, scheme: str) -> MambaLM:
    """Give a model without values the modules of a quantised one, without values either."""
    return _replace(lm, scheme, is_outline=True)


def _replace(lm: MambaLM, scheme: str, *, is_outline: bool) -> MambaLM:
    if (stored := scheme_of(lm)) is not None:
        raise ConfigError(f"quantize_lm: the model must be floating point; it is {stored} already.")
    places = list(_places(lm))
    for parent, name in places:
        module: Any = parent._modules[name]
        if not (is_plain(module, nn.Linear) or is_plain(module, nn.Embedding)):
            raise ConfigError(
                f"quantize_lm: {name} of {type(parent).__name__} must be a plain layer; it is a "
                f"{type(module).__name__}, swapped or hooked. Quantise before changing the model."
            )
    # All are made before one is put in place: an error leaves the model as it was.
    made = []
    for parent, name in places:
        is_tied = parent is lm and lm.config.tie_embeddings
        made.append(_made(parent, name, scheme, is_empty=is_outline or is_tied))
    for (parent, name), module in zip(places, made, strict=True):
        parent._modules[name] = module
    lm.tie_weights()
    return lm


def _made(parent: nn.Module, name: str, scheme: str, *, is_empty: bool) -> nn.Module:
    module: Any = parent._modules[name]
    try:
        return _empty(module, scheme) if is_empty else _full(module, scheme)
    except ConfigError as error:
        where = f"{name} of {type(parent).__name__}"
        raise ConfigError(f"quantize_lm: {where} cannot be quantised: {error}") from error


def _places(lm: MambaLM) -> Iterator[tuple[nn.Module, str]]:
    """Yield the parent and the name of every layer that is quantised, the embedding first."""
    yield lm.backbone, "embedding"
    for layer in lm.backbone.layers:
        for parent in layer.modules():
            for name in parent._modules:
                if name in _PROJECTIONS:
                    yield parent, name
    yield lm, "lm_head"


def quantized_modules(lm: MambaLM) -> Iterator[tuple[str, QuantizedLinear | QuantizedEmbedding]]:
    """Yield every quantised layer with its dotted name; a tied head comes last, if at all."""
    for name, module in lm.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            yield name, module


def _full(module: Any, scheme: str) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return QuantizedEmbedding.of(module, scheme)
    return QuantizedLinear.of(module, scheme)


def _empty(module: Any, scheme: str) -> nn.Module:
    rows, columns = module.weight.shape
    dtype = module.weight.dtype
    if isinstance(module, nn.Embedding):
        return QuantizedEmbedding(rows, columns, scheme, device="meta", dtype=dtype)
    layer = QuantizedLinear(columns, rows, scheme, device="meta", dtype=dtype)
    layer.bias = module.bias
    return layer
