"""Activation checkpointing: memory for time."""

from functools import partial

from torch.utils.checkpoint import checkpoint

from anymamba.models.lm import MambaLM

__all__ = ["recompute_layers"]


def recompute_layers(lm: MambaLM) -> None:
    """Make each layer keep its inputs only and run again in the backward."""
    for layer in lm.backbone.layers:
        # Nothing in a layer draws random numbers, so their state need not be kept.
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
