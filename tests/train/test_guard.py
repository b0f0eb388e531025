"""Laws of the guard against NaN and spikes."""

import math

import pytest

from anymamba.errors import ConfigError, NonFiniteError
from anymamba.train import Guard


def calm(steps: int = 30, **options: float) -> Guard:
    """Return a guard that has seen steps of loss 2."""
    guard = Guard(**{"spike_factor": 2.0, "max_skips": 3} | options)  # pyright: ignore[reportArgumentType]
    for _ in range(steps):
        assert guard.judge(2.0, 1.0) is None
    return guard


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf), (4.1, 1)]
)
def test_a_bad_step_is_skipped_with_a_reason(loss, norm):
    """NaN, infinities and spikes are named; a good step after them is taken."""
    guard = calm()
    why = guard.judge(loss, norm)
    assert why is not None
    assert "the " in why
    assert guard.judge(2.0, 1.0) is None
    assert guard.skipped == 1


def test_a_skipped_step_does_not_raise_the_expectation():
    """A row of spikes cannot make the next one look normal."""
    guard = calm(max_skips=50)
    before = guard.expected
    assert all(guard.judge(100.0, 1.0) for _ in range(50))
    assert guard.expected == before


def test_the_first_steps_may_jump():
    """Before there is an expectation only NaN and infinities are bad."""
    guard = calm(steps=3)
    assert guard.judge(50.0, 1.0) is None
    assert guard.judge(math.nan, 1.0) is not None


def test_factor_zero_allows_every_finite_loss():
    """Without a spike factor only NaN and infinities are skipped."""
    guard = calm(spike_factor=0)
    assert guard.judge(1e9, 1.0) is None
    assert guard.judge(math.inf, 1.0) is not None


def test_too_many_skips_in_a_row_stop_the_run():
    """The run ends at the skip after the last allowed one, and a good step starts a new count."""
    guard = calm()
    for _ in range(3):
        assert guard.judge(math.nan, 1.0)
    assert guard.judge(2.0, 1.0) is None
    for _ in range(3):
        assert guard.judge(math.nan, 1.0)
    with pytest.raises(NonFiniteError, match=r"after 3 skipped ones; the loss is nan\. Lower"):
        guard.judge(math.nan, 1.0)


def test_a_resumed_guard_judges_as_before():
    """State goes through plain values."""
    guard, again = calm(), Guard(spike_factor=2.0, max_skips=3)
    guard.judge(math.nan, 1.0)
    again.load_state_dict(guard.state_dict())
    for loss in (2.0, 3.9, 4.2, math.nan, 2.0):
        assert again.judge(loss, 1.0) == guard.judge(loss, 1.0)
    assert again.state_dict() == guard.state_dict()


@pytest.mark.parametrize(
    "options", [{"spike_factor": 0.5}, {"spike_factor": -1}, {"max_skips": -1}]
)
def test_rejects_limits_without_meaning(options):
    """A factor of 1 or less would skip ordinary steps."""
    with pytest.raises(ConfigError, match="must be"):
        Guard(**{"spike_factor": 2.0, "max_skips": 3} | options)
