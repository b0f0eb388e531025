"""The learning rate as a factor of its peak.

    cosine     0 -> 1 over the warm-up, half a cosine from 1 to the floor, then the floor
    wsd        0 -> 1 over the warm-up, 1, a straight line to the floor over the last share
    constant   0 -> 1 over the warm-up, then 1

Each is a pure function of the step, so that there is nothing to save and nothing to restore.
"""

import math

from anymamba.errors import ConfigError
from anymamba.train.recipe_sections import ScheduleRecipe

__all__ = ["cosine_factor", "schedule_factor", "warmup_factor", "wsd_factor"]


def schedule_factor(recipe: ScheduleRecipe, step: int, steps: int | None = None) -> float:
    """Return the factor of the peak learning rate at a step.

    Args:
        recipe: the kind of schedule and its sizes.
        step: number of the update, counted from 1: the factor at 0 is 0 whenever there is a
            warm-up, so an update numbered 0 would change nothing.
        steps: all updates of the run; "cosine" and "wsd" end there, "constant" needs none.

    Raises:
        ConfigError: the step is negative, the warm-up is longer than the run, or the end of the
            run is needed and not given.

    Example:
        >>> [schedule_factor(ScheduleRecipe(kind="constant", warmup=4), n) for n in (1, 4, 9)]
        [0.25, 1.0, 1.0]
    """
    if step < 0:
        raise ConfigError(f"schedule_factor: the step must be at least 0; got {step}.")
    if recipe.kind == "constant":
        return warmup_factor(step, recipe.warmup)
    if steps is None or steps < 1:
        raise ConfigError(
            f"schedule_factor: a {recipe.kind} schedule needs the number of steps; got {steps}. "
            "Set loop.steps, or schedule.kind='constant'."
        )
    if recipe.warmup > steps:
        raise ConfigError(
            f"schedule_factor: the warm-up must not be longer than the run; got {recipe.warmup} "
            f"of {steps} steps. Lower schedule.warmup."
        )
    if recipe.kind == "cosine":
        return cosine_factor(step, steps, warmup=recipe.warmup, floor=recipe.floor)
    return wsd_factor(
        step, steps, warmup=recipe.warmup, decay_share=recipe.decay_share, floor=recipe.floor
    )


def warmup_factor(step: int, warmup: int) -> float:
    """Return `step / warmup` up to the end of the warm-up, then 1.

    Args:
        step: of the run; at least 0.
        warmup: steps from 0 to the peak; 0 means none.

    Example:
        >>> warmup_factor(50, 100), warmup_factor(100, 100), warmup_factor(0, 0)
        (0.5, 1.0, 1.0)
    """
    return step / warmup if step < warmup else 1.0


def cosine_factor(step: int, steps: int, *, warmup: int = 0, floor: float = 0.01) -> float:
    """Return the factor of a warm-up followed by half a cosine.

        floor + (1 - floor) * (1 + cos(pi * p)) / 2        p = (step - warmup) / (steps - warmup)

    Args:
        step: of the run; at least 0.
        steps: where the floor is reached.
        warmup: steps from 0 to the peak; at most `steps`.
        floor: the factor from `steps` on.

    Example:
        >>> [cosine_factor(n, 1000, warmup=100) for n in (0, 50, 100, 1000)]
        [0.0, 0.5, 1.0, 0.01]
    """
    if step < warmup:
        return warmup_factor(step, warmup)
    if step >= steps:
        return floor
    progress = (step - warmup) / (steps - warmup)
    return floor + 0.5 * (1 - floor) * (1 + math.cos(math.pi * progress))


def wsd_factor(
    step: int, steps: int, *, warmup: int = 0, decay_share: float = 0.2, floor: float = 0.01
) -> float:
    """Return the factor of a warm-up, a stable stretch and a straight decay.

    The decay takes the last `round(decay_share * steps)` steps, or what the warm-up leaves of them.

    Args:
        step: of the run; at least 0.
        steps: where the floor is reached.
        warmup: steps from 0 to the peak; at most `steps`.
        decay_share: share of all steps that decay; in [0, 1].
        floor: the factor from `steps` on; with no step to decay in, the peak stays to the end.

    Example:
        >>> [wsd_factor(n, 1000, warmup=100, floor=0.0) for n in (50, 100, 800, 900, 1000)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return warmup_factor(step, warmup)
    decay = min(round(decay_share * steps), steps - warmup)
    start = steps - decay
    if step <= start:
        return 1.0
    if step >= steps:
        return floor
    return 1 - (1 - floor) * (step - start) / decay
