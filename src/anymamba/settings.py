"""Switches of the library; the only reader of the environment.

| variable | values | meaning |
|---|---|---|
| `ANYMAMBA_DENY_NAN` | 0, 1 (default 0) | operators raise `NonFiniteError` when they meet NaN |
| `ANYMAMBA_DENY_INF` | 0, 1 (default 0) | the same for infinities |
| `ANYMAMBA_NATIVE` | auto (default), off, or an instruction set | what the CPU kernels run on |
| `ANYMAMBA_NATIVE_LIBRARY` | a path (default: the built one) | another build of the CPU kernels |

Instruction sets: baseline, avx2, avx512, avx512_vnni, avx512_bf16 (x86-64); neon (Arm).
`anymamba doctor` says which of them this machine has.

The environment is read once, on import. Inside a program use `override`.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from anymamba.errors import ConfigError

__all__ = ["NATIVE_CHOICES", "Settings", "current", "override"]

NATIVE_CHOICES = ("auto", "off", "baseline", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "neon")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One consistent set of switches."""

    deny_nan: bool = False
    deny_inf: bool = False
    native: str = "auto"
    native_library: str | None = None

    def __post_init__(self) -> None:
        if self.native not in NATIVE_CHOICES:
            raise ConfigError(
                f"settings: native (ANYMAMBA_NATIVE) must be one of {', '.join(NATIVE_CHOICES)}; "
                f"got {self.native!r}. Unset it or correct it."
            )


def _flag(variable: str) -> bool:
    text = os.environ.get(variable, "0")
    if text not in ("0", "1"):
        raise ConfigError(f"{variable} must be 0 or 1; got {text!r}. Unset it or correct it.")
    return text == "1"


_base = Settings(
    deny_nan=_flag("ANYMAMBA_DENY_NAN"),
    deny_inf=_flag("ANYMAMBA_DENY_INF"),
    native=os.environ.get("ANYMAMBA_NATIVE", "auto"),
    native_library=os.environ.get("ANYMAMBA_NATIVE_LIBRARY"),
)
_current = _base
# Overrides in force, oldest first. A list and not a saved value: two threads may enter and leave in
# any order, and each must take only its own override away.
_overrides: list[dict[str, Any]] = []
_lock = threading.Lock()


def current() -> Settings:
    """Return the switches in force."""
    return _current


@contextmanager
def override(**switches: Any) -> Iterator[Settings]:
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
    replace(_base, **switches)  # a wrong value is refused before it is in force
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
