"""What `verify` needs to know of a model: whether it can judge it, on what, and how deep it is."""

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.errors import ConfigError
from anymamba.models.encoder import Encoder
from anymamba.models.latent import LatentModel
from anymamba.models.lm import MambaLM
from anymamba.nn import Stack

__all__ = ["Judged", "check_subject", "depth_of", "has_ssd", "inputs_for"]


class Judged(NamedTuple):
    """What the judge says: outputs of every place, and the final state."""

    logits: Tensor
    cache: Any


def check_subject(model: MambaLM | LatentModel) -> MambaLM | LatentModel:
    """Return the model with outputs at every place, if there are several ways to run it.

    Raises:
        ConfigError: there is one way only, or it is no model that `verify` knows.
    """
    is_paired = isinstance(model, LatentModel) and model.config.is_bidirectional
    if is_paired or isinstance(model, Encoder):
        raise ConfigError(
            "verify: there must be several ways to run a model; this one reads from both ends and "
            f"has forward only, as every {type(model).__name__} with a BidirectionalConfig has. "
            "Nothing to compare."
        )
    if not isinstance(model, MambaLM | LatentModel):
        raise ConfigError(
            "verify: the model must be a MambaLM or a causal LatentModel; got "
            f"{type(model).__name__}."
        )
    if stack_of(model).has_registers:
        raise ConfigError(
            "verify: wholes and steps must return the same rows; this model inserts registers, "
            "whose rows only wholes return. Verify it with registers=None."
        )
    if isinstance(model, LatentModel) and model.config.readout != "each":
        # The parameters stay shared; only the readout of the copy differs.
        model = copy.copy(model)
        model.config = replace(model.config, readout="each")
    return model


def inputs_for(
    model: MambaLM | LatentModel, given: Tensor | None, batch: int, length: int
) -> Tensor:
    """Return the inputs on the model's device: as given, or random ones that never change."""
    random = torch.Generator().manual_seed(0)
    if isinstance(model, MambaLM):
        if given is None:
            given = torch.randint(model.config.vocab_size, (batch, length), generator=random)
        return given.to(model.backbone.embedding.weight.device)
    if given is None:
        given = torch.randn(batch, length, model.config.d_input, generator=random)
    return given.to(model.in_proj.weight.device)


def stack_of(model: MambaLM | LatentModel) -> Stack:
    """Return the stack between embedding and head."""
    stack = model.backbone if isinstance(model, MambaLM) else model.stack
    assert isinstance(stack, Stack)
    return stack


def depth_of(model: MambaLM | LatentModel) -> int:
    """Return how many layers a token passes."""
    return len(stack_of(model).schedule)


def has_ssd(model: MambaLM | LatentModel) -> bool:
    """Return whether the layers, attention apart, have several algorithms to choose from."""
    kinds = {spec.kind for spec in stack_of(model).stack_config.specs} - {"MHA"}
    return bool(kinds) and "Mamba1" not in kinds
