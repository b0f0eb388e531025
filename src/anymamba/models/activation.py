"""Which activation of A a Mamba-3 checkpoint was trained with; no official config tells."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.errors import ConfigError, ShapeError
from anymamba.models.lm import MambaLM
from anymamba.nn import Mamba3
from anymamba.ops import A_ACTIVATIONS

__all__ = ["ActivationReport", "compare_activations"]

# The share by which the loss must rise under the other activation. Fresh weights change by 0.2%,
# tiny models after a minute of training by 5% and more.
DECISIVE = 0.01


class ActivationReport(NamedTuple):
    """Perplexity of a text under each activation, the better one, and whether that decides.

    `configured` is the activation the model runs with.
    """

    perplexity: dict[str, float]
    best: str
    is_decisive: bool
    configured: str


@torch.no_grad()
def compare_activations(lm: MambaLM, ids_bs: Tensor) -> ActivationReport:
    """Measure the perplexity of a text under every activation of A, and say which one fits.

    The two differ little near zero and part where training has moved A, so weights fresh from
    their initialisation decide nothing.

    Args:
        lm: a Mamba-3 model; it is the same afterwards.
        ids_bs: token ids of real text; at least two per row.

    Raises:
        ConfigError: the model has no Mamba-3 layers.
        ShapeError: a row is too short to predict anything.
    """
    mixers = [layer.mixer for layer in lm.backbone.layers if isinstance(layer.mixer, Mamba3)]
    if not mixers:
        raise ConfigError(
            f"compare_activations: the model must have Mamba-3 layers; got {lm.config.layer}. "
            "Only Mamba-3 has two activations of A."
        )
    if ids_bs.dim() != 2 or ids_bs.shape[1] < 2:
        raise ShapeError(
            "compare_activations: the ids must be (batch, sequence) with two tokens or more per "
            f"row; got shape {tuple(ids_bs.shape)}. Give a longer text."
        )
    loss: dict[str, float] = {}
    for activation in A_ACTIVATIONS:
        with _under(mixers, activation):
            loss[activation] = float(lm.loss(ids_bs))
    best = min(loss, key=lambda name: (math.isnan(loss[name]), loss[name]))
    others = [value for name, value in loss.items() if name != best]
    is_decisive = all(math.isnan(x) or x > (1 + DECISIVE) * loss[best] for x in others)
    perplexity = {name: _exp(value) for name, value in loss.items()}
    return ActivationReport(perplexity, best, is_decisive, mixers[0].a_activation)


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


@contextmanager
def _under(mixers: list[Mamba3], activation: str) -> Iterator[None]:
    before = [mixer.a_activation for mixer in mixers]
    for mixer in mixers:
        mixer.a_activation = activation
    try:
        yield
    finally:
        for mixer, name in zip(mixers, before, strict=True):
            mixer.a_activation = name
