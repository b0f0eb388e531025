"""Switches of the library; the only reader of the environment.

| variable | values | meaning |
|---|---|---|
| `ANYMAMBA_DENY_NAN` | 0, 1 (default 0) | operators raise `NonFiniteError` when they meet NaN |
| `ANYMAMBA_DENY_INF` | 0, 1 (default 0) | the same for infinities |

The environment is read once, on import. Inside a program use `override`.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

from anymamba.errors import ConfigError

__all__ = ["Settings", "current", "override"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One consistent set of switches."""

    deny_nan: bool = False
    deny_inf: bool = False


def _flag(variable: str) -> bool:
    text = os.environ.get(variable, "0")
    if text not in ("0", "1"):
        raise ConfigError(f"{variable} must be 0 or 1; got {text!r}. Unset it or correct it.")
    return text == "1"


_base = Settings(deny_nan=_flag("ANYMAMBA_DENY_NAN"), deny_inf=_flag("ANYMAMBA_DENY_INF"))
_current = _base
# Overrides in force, oldest first. A list and not a saved value: two threads may enter and leave in
# any order, and each must take only its own override away.
_overrides: list[dict[str, bool]] = []
_lock = threading.Lock()


def current() -> Settings:
    """Return the switches in force."""
    return _current


@contextmanager
def override(**switches: bool) -> Iterator[Settings]:
    """Change switches for the length of a `with` block, in all threads.

    Example:
        >>> with override(deny_nan=True) as settings:
        ...     settings.deny_nan
        True
    """
    known = {field.name for field in fields(Settings)}
    if unknown := sorted(set(switches) - known):
        raise ConfigError(
            f"settings.override: unknown switch {unknown[0]!r}. Known: {sorted(known)}."
        )
    with _lock:
        _overrides.append(switches)
        _apply()
    try:
        yield _current
    finally:
        with _lock:
            place = next(i for i, entry in enumerate(_overrides) if entry is switches)
            del _overrides[place]
            _apply()


def _apply() -> None:
    global _current
    _current = _base
    for switches in _overrides:
        _current = replace(_current, **switches)
