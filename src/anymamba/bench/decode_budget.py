"""The performance budget of decoding."""

from collections.abc import Iterator, Sequence

from anymamba.bench.budget import Promise
from anymamba.bench.decode import OURS, Decoding

__all__ = ["decode_promises"]

# Shares of the rate of reading memory: one row, and eight rows.
DECODE_SHARES = {"float32": 0.90, "bfloat16": 0.90, "int8": 0.80, "int4": 0.65}
DECODE_SHARE_OF_EIGHT = 0.70
# Speed over llama.cpp, one row, by family and format.
DECODE_OVER_LLAMA = {
    "mamba-": {"float32": 1.05, "bfloat16": 1.2, "int8": 1.5, "int4": 1.6},
    "mamba2-": {"float32": 1.0, "bfloat16": 1.05, "int8": 1.2, "int4": 1.15},
}


def decode_promises(figures: Sequence[Decoding]) -> list[Promise]:
    """Return the lines of the budget about decoding.

    Args:
        figures: measured models, formats and rows; beside ours those of the peer.
    """
    found = []
    theirs = {(x.model, x.format, x.rows): x for x in figures if x.engine != OURS}
    figures = [x for x in figures if x.engine == OURS]
    alone = {(x.model, x.format): x for x in figures if x.rows == 1}
    for figure in figures:
        what = f"{figure.model}, {figure.format}, decoding {figure.rows}"
        share = figure.share if figure.has_speed else None
        if figure.rows == 1:
            target = DECODE_SHARES[figure.format]
            found.append(Promise(what, "share of the ideal", ">=", target, share, figure.why_not))
            found.extend(_over_llama(what, figure, theirs))
        elif figure.rows == 8 and figure.format != "float32":
            target = DECODE_SHARE_OF_EIGHT
            found.append(Promise(what, "share of the ideal", ">=", target, share, figure.why_not))
        elif figure.rows == 8 and (one := alone.get((figure.model, figure.format))):
            why_not = figure.why_not or one.why_not
            ratio = _speed_over(figure, one)
            found.append(Promise(what, "speed over one row", ">=", 4.0, ratio, why_not))
    return found


def _over_llama(
    what: str, figure: Decoding, theirs: dict[tuple[str, str, int], Decoding]
) -> Iterator[Promise]:
    for family, targets in DECODE_OVER_LLAMA.items():
        if not figure.model.startswith(family):
            continue
        other = theirs[figure.model, figure.format, figure.rows]
        ratio, why_not = _speed_over(figure, other), figure.why_not or other.why_not
        target = targets[figure.format]
        yield Promise(what, "speed over llama.cpp", ">=", target, ratio, why_not)


def _speed_over(figure: Decoding, other: Decoding) -> float | None:
    if not (figure.has_speed and other.has_speed):
        return None
    return figure.tokens_per_second / other.tokens_per_second
