"""Schedules: the published values, the borders, and nothing remembered between steps."""

import itertools
import math

import pytest

from anymamba.errors import ConfigError
from anymamba.train import ScheduleRecipe, cosine_factor, schedule_factor, wsd_factor

COSINE = ScheduleRecipe(kind="cosine", warmup=100, floor=0.01)
WSD = ScheduleRecipe(kind="wsd", warmup=100, decay_share=0.2, floor=0.1)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.0), (1, 0.01), (50, 0.5), (100, 1.0), (550, 0.505), (1000, 0.01), (5000, 0.01)],
)
def test_cosine_has_the_published_values(step: int, expected: float) -> None:
    """Warm-up from 0, the peak at its end, halfway in the middle, the floor from the last step."""
    assert schedule_factor(COSINE, step, 1000) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.0),
        (50, 0.5),
        (100, 1.0),
        (500, 1.0),
        (800, 1.0),
        (900, 0.55),
        (1000, 0.1),
        (2000, 0.1),
    ],
)
def test_wsd_warms_up_stays_and_decays(step: int, expected: float) -> None:
    """A line up, the peak, a line down over the last share of the steps."""
    assert schedule_factor(WSD, step, 1000) == pytest.approx(expected, abs=1e-12)


def test_constant_keeps_the_peak_for_ever() -> None:
    """Without a warm-up the factor is 1 at every step; with one it ends at the peak and stays."""
    plain = ScheduleRecipe(kind="constant", warmup=0)
    warmed = ScheduleRecipe(kind="constant", warmup=10)
    assert [schedule_factor(plain, step) for step in (0, 1, 10**9)] == [1.0] * 3
    assert [schedule_factor(warmed, step) for step in (0, 5, 10, 10**9)] == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("recipe", [COSINE, WSD])
def test_a_factor_depends_on_the_step_alone(recipe: ScheduleRecipe) -> None:
    """Asked in any order, as after a resume, each step has the same factor."""
    forwards = [schedule_factor(recipe, step, 1000) for step in range(1100)]
    backwards = [schedule_factor(recipe, step, 1000) for step in reversed(range(1100))]
    assert forwards == backwards[::-1]


@pytest.mark.parametrize("recipe", [COSINE, WSD])
def test_a_factor_rises_once_and_falls_once(recipe: ScheduleRecipe) -> None:
    """It never jumps: up in the warm-up, never up after it, never below the floor."""
    factors = [schedule_factor(recipe, step, 1000) for step in range(1001)]
    rise, fall = factors[: recipe.warmup + 1], factors[recipe.warmup :]
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    assert factors[-1] == min(fall) == recipe.floor
    assert max(abs(a - b) for a, b in itertools.pairwise(factors)) < 0.011


@pytest.mark.parametrize("factor", [cosine_factor, wsd_factor])
def test_a_run_of_warmup_alone_ends_at_its_end(factor) -> None:
    """With no step left after the warm-up there is nothing to divide by."""
    assert math.isclose(0.5, factor(5, 10, warmup=10))
    assert 0 <= factor(10, 10, warmup=10, floor=0.0) <= 1


def test_wsd_without_a_decay_keeps_the_peak_to_the_end() -> None:
    """A share of 0, or one too small for a step, is no decay; a share of 1 leaves the warm-up."""
    assert [wsd_factor(n, 10, decay_share=0.0) for n in (5, 10)] == [1.0, 1.0]
    assert [wsd_factor(n, 10, decay_share=0.04) for n in (5, 10)] == [1.0, 1.0]
    assert wsd_factor(4, 10, warmup=2, decay_share=1.0, floor=0.0) == 0.75


@pytest.mark.parametrize(
    ("recipe", "step", "steps", "says"),
    [
        (COSINE, -1, 1000, "at least 0; got -1"),
        (COSINE, 1, None, "cosine schedule needs the number of steps"),
        (WSD, 1, 0, "wsd schedule needs the number of steps"),
        (WSD, 1, 99, "got 100 of 99 steps"),
    ],
)
def test_rejects_a_schedule_without_an_end(recipe, step, steps, says: str) -> None:
    """A schedule that would have to guess says what is missing."""
    with pytest.raises(ConfigError, match=says):
        schedule_factor(recipe, step, steps)
