"""How fast a run is, beside what the machine could do at best.

The ideal is the unavoidable work of a training step, three times the forward, at the rate of a
large matrix product on the same machine. The share of it is honest across machines: a slow machine
has a slow ideal.
"""

import time

import torch

__all__ = ["SpeedMeter", "matmul_rate"]

_SIZE = 1024
_REPEATS = 5


def matmul_rate(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, size: int = _SIZE
) -> float:
    """Return the FLOP per second of a square matrix product, the best of a few runs.

    Args:
        device: where to multiply.
        dtype: of the factors.
        size: rows and columns.
    """
    left = torch.ones(size, size, device=device, dtype=dtype)
    out = torch.empty_like(left)
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        torch.mm(left, left, out=out)
        # Reading one value waits for devices that work in the background.
        float(out[0, 0])
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


class SpeedMeter:
    """Counts tokens and the seconds they took, evaluation and checkpoints not included.

    Args:
        flops_per_token: of training, forward and backward.
        rate: FLOP per second of the machine at its best.

    Example:
        >>> meter = SpeedMeter(flops_per_token=10.0, rate=1000.0)
        >>> meter.add(tokens=50, seconds=2.0)
        >>> meter.tokens_per_second, meter.share_of_ideal
        (25.0, 0.25)
    """

    def __init__(self, flops_per_token: float, rate: float) -> None:
        """Start at zero."""
        self.flops_per_token, self.rate = flops_per_token, rate
        self.reset()

    def saw_rate(self, rate: float) -> None:
        """Take another measurement of the machine: what it can do is the best it has shown."""
        self.rate = max(self.rate, rate)

    def reset(self) -> None:
        """Forget what was counted."""
        self._tokens, self._seconds = 0, 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count a step."""
        self._tokens += tokens
        self._seconds += seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens over the time they took; 0 before the first."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def share_of_ideal(self) -> float:
        """The time the work would take at best, over the time it took."""
        return self.tokens_per_second * self.flops_per_token / self.rate
