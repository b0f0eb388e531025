"""Which values fit the annotated type of a recipe's field, and how to say what it wants."""

import math
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

__all__ = ["UNIONS", "expected_of", "fits"]

# `int | None` is of one kind, and `Literal[...] | None` of the other.
UNIONS = (Union, UnionType)


def fits(value: Any, kind: Any) -> bool:
    """Say whether a value has an annotated type; an integer is a float, a flag is no integer.

    Example:
        >>> fits(1, float), fits(True, int), fits((1, 2), tuple[int, ...])
        (True, False, True)
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in UNIONS:
        return any(fits(value, option) for option in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return len(value) == len(kinds) and all(map(fits, value, kinds))
    if origin is dict:
        return isinstance(value, dict) and all(_is_plain(entry) for entry in value.values())
    if kind in (int, float):
        numbers = (int,) if kind is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind)


def expected_of(kind: Any) -> str:
    """Say in words what a type wants.

    Example:
        >>> expected_of(tuple[str, ...] | None)
        'a list of strings or "none"'
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in UNIONS:
        return " or ".join(expected_of(option) for option in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin is tuple:
        number = "a list of" if arguments[-1] is Ellipsis else f"a list of {len(arguments)}"
        return f"{number} {_WORDS[arguments[0]][1]}"
    return _WORDS[origin or kind][0]


_WORDS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "flags"),
    int: ("a whole number", "whole numbers"),
    float: ("a finite number", "finite numbers"),
    str: ("a string", "strings"),
    dict: ("a table of numbers, strings, flags and lists of them", "tables"),
    NoneType: ('"none"', "nothing"),
}


def _is_plain(value: Any) -> bool:
    """Say whether TOML can hold a value of `ssm_cfg`."""
    if isinstance(value, list | tuple):
        return all(_is_plain(entry) for entry in value)
    return isinstance(value, bool | int | float | str)
