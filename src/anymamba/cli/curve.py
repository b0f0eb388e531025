"""A curve in a terminal: braille dots, eight to a character."""

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["Point", "curve_lines", "value_range"]

Point = tuple[float, float]

BLANK = 0x2800
# The bit of each dot in a braille character: two columns, four rows from the top.
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def curve_lines(
    points: Sequence[Point],
    marks: Sequence[Point],
    *,
    width: int,
    height: int,
    right: float,
    low: float,
    high: float,
) -> list[list[tuple[str, bool]]]:
    """Return a curve as rows of characters, each with whether it is a mark.

    Args:
        points: of the curve, by rising x.
        marks: drawn over it as single characters.
        width: characters per row.
        height: rows.
        right: the x of the right edge; the left edge is 0.
        low: the y of the lower edge.
        high: the y of the upper edge; values beyond are drawn at the edge.

    Example:
        >>> [row] = curve_lines([(0, 0.0), (4, 1.0)], [], width=2, height=1, right=4, low=0, high=1)
        >>> "".join(character for character, _ in row)
        '⡠⠊'
    """
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]

    def place(point: Point) -> tuple[int, int]:
        share_x = point[0] / right if right > 0 else 0.0
        share_y = (point[1] - low) / (high - low) if high > low else 0.5
        share_x, share_y = (min(max(share, 0.0), 1.0) for share in (share_x, share_y))
        return round(share_x * (columns - 1)), round((1 - share_y) * (rows - 1))

    for column, row in _joined([place(point) for point in points]):
        cells[row // 4][column // 2] |= _BITS[row % 4][column % 2]
    # Some fonts draw the empty braille character as eight circles.
    lines = [[(chr(BLANK | cell) if cell else " ", False) for cell in line] for line in cells]
    for mark in marks:
        column, row = place(mark)
        lines[row // 4][column // 2] = ("●", True)
    return lines


def _joined(places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return one dot per column between neighbours, and the dots of steep jumps."""
    dots = places[:1]
    for (x, y), (next_x, next_y) in pairwise(places):
        count = max(abs(next_x - x), abs(next_y - y), 1)
        for turn in range(1, count + 1):
            share = turn / count
            dots.append((round(x + share * (next_x - x)), round(y + share * (next_y - y))))
    return dots


def value_range(points: Sequence[Point]) -> tuple[float, float]:
    """Return the lowest value, and one that leaves out the highest tenth: losses begin high.

    Example:
        >>> value_range([(x, float(x)) for x in range(21)])
        (0.0, 18.0)
    """
    values = sorted(value for _, value in points)
    if not values:
        return 0.0, 1.0
    low, high = values[0], values[int(0.9 * (len(values) - 1))]
    return (low, high) if high > low else (low - 0.5, low + 0.5)
