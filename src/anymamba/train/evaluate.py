"""How good a model is: loss and bits per byte on held-out text, and what it writes."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from anymamba.errors import ConfigError
from anymamba.generate import generate
from anymamba.io import Tokenizer
from anymamba.models import MambaLM
from anymamba.train.batches import Batch
from anymamba.train.learner import Learner
from anymamba.train.rank_learner import RankLearner
from anymamba.train.recipe_sections import LoopRecipe

__all__ = ["Evaluation", "evaluate", "sample"]


class Evaluation(NamedTuple):
    """The mean loss per prediction in nats, the bits per byte of text, and how much was read."""

    loss: float
    bits_per_byte: float
    predictions: int
    bytes_count: float


@torch.no_grad()
def evaluate(
    lm: MambaLM,
    batches: Iterable[Batch],
    recipe: LoopRecipe | None = None,
    learner: RankLearner | None = None,
) -> Evaluation:
    """Run a model over finite batches; its training is not disturbed.

    Args:
        lm: the model.
        batches: what `validation_batches` yields.
        recipe: where to run and whether to autocast; the model's device and no autocast when
            omitted.
        learner: of a model that several ranks share, all of which then call this.

    Raises:
        ConfigError: there is nothing to predict.
    """
    # A learner of its own: the state that training carries stays where it is. Layers that training
    # wrapped stay wrapped, which costs nothing without gradients.
    plain = LoopRecipe(autocast="none" if recipe is None else recipe.autocast)
    judge = Learner(lm, plain) if learner is None else learner
    device = lm.backbone.embedding.weight.device
    nats, predictions, bytes_count = 0.0, 0, 0.0
    for batch in batches:
        many = batch.predictions
        nats += many * float(judge.loss(batch.to(device)))
        predictions += many
        bytes_count += batch.bytes_count
    if predictions == 0 or bytes_count == 0:
        raise ConfigError(
            "evaluate: there must be held-out text; got none. "
            "Set data.valid, or raise data.valid_share."
        )
    bits = nats / math.log(2) / bytes_count
    return Evaluation(nats / predictions, bits, predictions, bytes_count)


def sample(
    lm: MambaLM,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> str:
    """Return what the model writes after a prompt; an empty prompt is the start of a document.

    Args:
        lm: the model.
        tokenizer: the one it was trained with.
        prompt: text to continue.
        max_new_tokens: at most this many tokens.
        temperature: 0 takes the likeliest token.
        top_p: keep the likeliest tokens up to this mass.
        seed: the same seed draws the same tokens.
    """
    marks = [mark for mark in (tokenizer.bos_id, tokenizer.eos_id) if mark is not None]
    # As in training: the mark that begins a text, or else the one that ended the text before.
    ids = [*marks[:1], *tokenizer.encode(prompt, add_special_tokens=False)]
    [new_ids] = generate(
        lm,
        [ids],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop_ids=marks,
    )
    return tokenizer.decode([token for token in new_ids if token not in marks])
