"""Targets: the one that does not count, and the check that the others are entries of a row."""

from torch import Tensor

from anymamba.errors import ShapeError

__all__ = ["IGNORE", "check_entries"]

IGNORE = -100


def check_entries(where: str, targets_s: Tensor, entries: int) -> None:
    """Raise `ShapeError` unless every target is an entry of a row, or does not count."""
    wrong_s = (targets_s != IGNORE) & ((targets_s < 0) | (targets_s >= entries))
    if bool(wrong_s.any()):
        raise ShapeError(
            f"{where}: a target must lie in 0..{entries - 1} or be {IGNORE}; "
            f"got {targets_s[wrong_s][0].item()}."
        )
