"""The guard against steps that would ruin a run: NaN, infinities, and sudden spikes of the loss."""

import math
from typing import Any

from anymamba.errors import ConfigError, NonFiniteError

__all__ = ["Guard"]

# How fast the expected loss follows: about the last 50 steps.
_MEMORY = 0.98
# Before this many steps the loss falls too fast for an expectation.
_PATIENCE = 20


class Guard:
    """Judges every step before the optimiser takes it: take it, or skip it and say why.

    A step is skipped when its loss or the norm of its gradient is not finite, or when its loss is
    more than `spike_factor` times the mean of the recent losses. Skipped steps do not move that
    mean. After `max_skips` skips in a row the run stops, because the next step would not be better.

    Args:
        spike_factor: how many times the recent loss is a spike; above 1, or 0 to look for NaN and
            infinities only.
        max_skips: how many steps in a row may be skipped; 0 stops at the first bad one.

    Example:
        >>> guard = Guard(spike_factor=3.0, max_skips=2)
        >>> guard.judge(5.5, 1.0), guard.judge(math.nan, 1.0)
        (None, 'the loss is nan')
    """

    def __init__(self, *, spike_factor: float, max_skips: int) -> None:
        """Start without an expectation."""
        if not (spike_factor == 0 or spike_factor > 1):
            raise ConfigError(
                f"Guard: spike_factor must be above 1, or 0 for no limit; got {spike_factor}."
            )
        if max_skips < 0:
            raise ConfigError(f"Guard: max_skips must be at least 0; got {max_skips}.")
        self.spike_factor, self.max_skips = spike_factor, max_skips
        self.expected, self.taken, self.skipped_in_a_row, self.skipped = 0.0, 0, 0, 0

    def judge(self, loss: float, grad_norm: float) -> str | None:
        """Return None when the step may be taken, else why it must be skipped.

        Args:
            loss: the mean loss of the step.
            grad_norm: the norm of its gradient, before clipping.

        Raises:
            NonFiniteError: `max_skips` steps in a row had to be skipped, and now one more.
        """
        why = self._why(loss, grad_norm)
        if why is None:
            share = _MEMORY if self.taken else 0.0
            self.expected = share * self.expected + (1 - share) * loss
            self.taken += 1
            self.skipped_in_a_row = 0
            return None
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row > self.max_skips:
            raise NonFiniteError(
                f"Guard: a step must be good after {self.max_skips} skipped ones; {why}. "
                "Lower optim.lr, lengthen schedule.warmup or tighten optim.clip, and begin a new "
                "run with another loop.out."
            )
        return why

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive an interruption, as plain values."""
        names = ("expected", "taken", "skipped_in_a_row", "skipped")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the result of `state_dict`."""
        for name in self.state_dict():
            setattr(self, name, state[name])

    def _why(self, loss: float, grad_norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the norm of the gradient is {grad_norm}"
        limit = self.spike_factor * self.expected
        if self.spike_factor and self.taken >= _PATIENCE and loss > limit:
            return f"the loss jumped to {loss:.3f}, above {limit:.3f}"
        return None
