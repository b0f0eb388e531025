"""How studies tell their numbers: mean and range over seeds, tables in Markdown."""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """Mean over seeds and the distances from it to the lowest and the highest."""

    mean: float
    below: float
    above: float


def spread(values: Sequence[float]) -> Spread:
    """Return the mean with the range as its error bar: with few seeds, no model of the noise."""
    mean = statistics.fmean(values)
    return Spread(mean, mean - min(values), max(values) - mean)


def ranged(values: Sequence[float], digits: int = 1, *, count: bool = False) -> str:
    """Return mean and range as text, and how many values there are; `-` where there are none.

    Example:
        >>> ranged([1.0, 2.0], count=True)
        '1.5 (1.0 to 2.0, n=2)'
        >>> ranged([-0.04])
        '0.0 (0.0 to 0.0)'
    """
    if not values:
        return "-"
    # Zero is added, because a rounded -0.0 would keep its sign.
    mean, low, high = (
        f"{round(x, digits) + 0.0:.{digits}f}"
        for x in (statistics.fmean(values), min(values), max(values))
    )
    return f"{mean} ({low} to {high}" + (f", n={len(values)})" if count else ")")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown.

    Example:
        >>> print(table(["a", "b"], [["1", "2"]]))
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    first, *others = ("| " + " | ".join(row) + " |" for row in (heads, *rows))
    return "\n".join([first, "|---" * len(heads) + "|", *others])
