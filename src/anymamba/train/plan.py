"""What can be said of a run before it begins: who owns which parameter, how many steps fit."""

import statistics
import time

import torch

from anymamba.errors import ConfigError
from anymamba.io import load_tokenizer, usable_device
from anymamba.train.batches import training_batches
from anymamba.train.learner import Learner, build_model, check_mode
from anymamba.train.optim import build_optimizer
from anymamba.train.recipe_sections import Recipe
from anymamba.train.run_folder import RunFolder

__all__ = ["describe_recipe", "steps_within"]

# The first steps also fill torch's memory pools.
_WARM_UP = 2
_TIMED = 7


def describe_recipe(recipe: Recipe) -> str:
    """Return which optimiser owns which parameter, without reading data or allocating weights."""
    vocab_size = load_tokenizer(recipe.data.tokenizer).vocab_size
    lm = build_model(recipe.model, vocab_size, "meta")
    check_mode(recipe.data.mode, lm)
    return build_optimizer(lm, recipe.optim).describe()


def steps_within(recipe: Recipe, seconds: float) -> int:
    """Return how many steps fit into a time on this machine, by taking a few with a scratch model.

    A schedule must know its last step, and a run that stops by the clock does not: this turns a
    time into steps before the run. Token files are written and will be reused.

    Args:
        recipe: the run; its number of steps does not matter.
        seconds: of training.

    Raises:
        ConfigError: the time is not positive, or the recipe cannot be followed.
    """
    if not seconds > 0:
        raise ConfigError(f"steps_within: seconds must be positive; got {seconds}.")
    if recipe.loop.threads is not None:
        torch.set_num_threads(recipe.loop.threads)
    device = usable_device("steps_within", recipe.loop.device)
    data = RunFolder(recipe.loop.out).prepare_data(recipe.data)
    try:
        lm = build_model(recipe.model, data.vocab_size, device)
        check_mode(recipe.data.mode, lm)
        learner, optimizer = Learner(lm, recipe.loop), build_optimizer(lm, recipe.optim)
        batches = training_batches(data.train, recipe.data)
        times: list[float] = []
        for _ in range(_WARM_UP + _TIMED):
            start = time.perf_counter()
            for _ in range(recipe.loop.accumulate):
                loss = learner.loss(next(batches).to(device))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - start)
    finally:
        data.close()
    return max(1, int(seconds / statistics.median(times[_WARM_UP:])))
