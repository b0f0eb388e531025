"""How ranks wait for each other, judged on every rank.

python waiting_cases.py FOLDER RANKS      see worlds.py
"""

import os
import time

import torch.distributed as dist

from anymamba.errors import BackendError, ConfigError
from anymamba.train import ParallelRecipe, Ranks, open_ranks
from worlds import main

TIMEOUT, LONG = 1.0, 3.0


def ranks() -> Ranks:
    """Join, as under torchrun."""
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    return open_ranks(ParallelRecipe(timeout=TIMEOUT), "cpu")


def prepares_long() -> float:
    """Return 0 if the others wait for the first rank's files, longer than for any message."""
    together, made = ranks(), []

    def make() -> int:
        time.sleep(LONG if dist.get_rank() == 0 else 0)
        made.append(True)
        return dist.get_rank()

    return float(together.after_first(make) != dist.get_rank() or len(made) != 1)


def errors_are_shared() -> float:
    """Return 0 if what the first rank cannot prepare is told by everybody."""

    def make() -> None:
        raise ConfigError("data: no text")

    try:
        ranks().after_first(make)
    except ConfigError as error:
        return float("no text" not in str(error))
    return 1.0


def silence_ends() -> float:
    """Return 0 if a message that does not come is given up after the timeout, with our words."""
    together = ranks()
    if dist.get_rank() == 0:
        time.sleep(LONG)
        return 0.0
    start = time.monotonic()
    try:
        together.largest(1.0)
    except RuntimeError as error:
        words = together.explain(error)
        is_in_time = time.monotonic() - start < LONG
        return float(not is_in_time or not isinstance(words, BackendError))
    return 1.0


# The last one leaves a message unanswered.
CHECKS = {
    "prepares long": prepares_long,
    "errors are shared": errors_are_shared,
    "silence ends": silence_ends,
}

if __name__ == "__main__":
    main(CHECKS)
