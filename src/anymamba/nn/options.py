"""Checks of the arguments that blocks and stacks are built with."""

import difflib
from collections.abc import Iterable

from anymamba.errors import ConfigError

__all__ = ["check_scan_options", "nearest", "reject_unknown"]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


def reject_unknown(where: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raise `ConfigError` on an unknown argument, with the nearest known name."""
    for name in unknown:
        hint = nearest(name, known) or f" Known: {', '.join(sorted(known))}."
        raise ConfigError(f"{where}: unknown argument {name!r}.{hint}")


def check_scan_options(
    where: str, chunk_size: int | None, dt_limit: tuple[float, float] | None
) -> None:
    """Raise `ConfigError` on a chunk length or step-size clamp that no call could use."""
    if chunk_size is not None and chunk_size < 1:
        raise ConfigError(
            f"{where}: chunk_size must be positive; got {chunk_size}. None lets the sizes choose."
        )
    if dt_limit is not None and not (len(dt_limit) == 2 and 0 <= dt_limit[0] <= dt_limit[1]):
        raise ConfigError(
            f"{where}: dt_limit must be (low, high) with 0 <= low <= high; got {dt_limit}."
        )
