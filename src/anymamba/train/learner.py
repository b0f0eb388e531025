"""The model as the loop sees it: a loss for a batch, and the state that is carried between batches.

Autocast, activation checkpointing and compilation are decided here, and nowhere else.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from anymamba.errors import AnyMambaError, ConfigError
from anymamba.models import MambaLM, recompute_layers
from anymamba.nn import ModelCache
from anymamba.train.batches import Batch
from anymamba.train.recipe_sections import LoopRecipe, ModelRecipe

__all__ = ["Learner"]


class Learner:
    """Computes losses of batches, and keeps each row's state where a batch carries it on.

    Back-propagation is truncated at the borders of batches: values cross them, gradients do not. A
    row that begins a document starts from the model's own initial state, with its gradient.

    Args:
        lm: the model; its layers are wrapped when activations are to be recomputed.
        recipe: autocast, recomputation and compilation.
    """

    def __init__(self, lm: MambaLM, recipe: LoopRecipe) -> None:
        """Take the model; there is no state yet."""
        self.lm, self._recipe = lm, recipe
        self.state: ModelCache | None = None
        if recipe.checkpoint_activations:
            recompute_layers(lm)
        self._loss: Any = torch.compile(lm.prefill_loss) if recipe.compile else lm.prefill_loss

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch and move the carried state behind it."""
        before = None if batch.carry is None else self._before(batch.carry)
        with self._autocast():
            loss, after = self._loss(
                batch.ids_bs,
                batch.targets_bs,
                before,
                cu_seqlens=batch.cu_seqlens,
                seq_idx=batch.seq_idx,
            )
        self.state = None if batch.carry is None else after.detach()
        return loss

    def forget(self) -> None:
        """Drop the carried state: every row begins anew."""
        self.state = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the carried state by name; empty when there is none."""
        return {} if self.state is None else self.state.to_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up the result of `state_tensors`; raises `CacheError` when it does not fit."""
        if not tensors:
            self.state = None
            return
        like = self.lm.empty_cache(1)
        kinds = [type(layer) for layer in like.layers]
        state = ModelCache.from_tensors(dict(tensors), kinds)
        self.state = state.to(device=like.position_b.device)

    def _before(self, carry_b: Tensor) -> ModelCache:
        """Return the state that each row starts from."""
        fresh = self.lm.empty_cache(carry_b.shape[0])
        if self.state is None:
            return fresh
        kept = self.state.to_tensors()
        # Rows that begin a document take the model's own initial state, whatever it has learned.
        chosen = {
            name: torch.where(carry_b.reshape(-1, *[1] * (value.dim() - 1)), kept[name], value)
            for name, value in fresh.to_tensors().items()
        }
        return ModelCache.from_tensors(chosen, [type(layer) for layer in fresh.layers])

    def _autocast(self) -> AbstractContextManager[Any]:
        device = self.lm.backbone.embedding.weight.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self._recipe.autocast == "bfloat16")


def build_model(recipe: ModelRecipe, vocab_size: int, device: torch.device | str) -> MambaLM:
    """Return the model that a recipe describes.

    Args:
        recipe: sizes and options.
        vocab_size: number of token ids.
        device: of the parameters.

    Raises:
        ConfigError: the recipe describes no model.
    """
    config = recipe.config(vocab_size)
    try:
        return MambaLM(config, device=device)
    except AnyMambaError:
        raise
    # Values of a wrong type fail anywhere in the constructors.
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"model: sizes and options must describe a model; {error}. "
            "Correct model.ssm_cfg and model.attn_cfg."
        ) from error


def check_mode(mode: str, lm: MambaLM) -> None:
    """Raise unless the model can carry its state: keys and values of attention would only grow.

    Raises:
        ConfigError: carried batches and attention layers.
    """
    if mode == "carried" and lm.config.attn_layer_idx:
        raise ConfigError(
            "data: mode 'carried' needs layers whose state has a fixed size; got attention at "
            f"{lm.config.attn_layer_idx}. Set data.mode='packed'."
        )
