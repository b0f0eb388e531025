"""Recipes as text: TOML files, `a.b=c` overrides, and the difference between two runs.

The fields are in `recipe_sections.py`, and are offered here too.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from anymamba.errors import ConfigError
from anymamba.io import utf8
from anymamba.train.recipe_sections import (
    DataRecipe,
    LoopRecipe,
    ModelRecipe,
    OptimRecipe,
    ParallelRecipe,
    Recipe,
    ScheduleRecipe,
)
from anymamba.train.recipe_types import UNIONS, expected_of, fits

__all__ = [
    "DataRecipe",
    "LoopRecipe",
    "ModelRecipe",
    "OptimRecipe",
    "ParallelRecipe",
    "Recipe",
    "ScheduleRecipe",
    "load_recipe",
    "recipe_difference",
    "recipe_to_toml",
]

WHERE = "recipe"
# TOML has no word for nothing.
NOTHING = "none"
# What a resumed run may say differently: it decides what is written down, and where, but not what
# is learned. `threads` and the use of ranks move only the last bits of sums. Token files are known
# by their content.
FREE_ON_RESUME = frozenset(
    {
        "data.cache_dir",
        "loop.checkpoint_every",
        "loop.evaluate_every",
        "loop.evaluate_tokens",
        "loop.keep",
        "loop.max_skips",
        "loop.out",
        "loop.report_every",
        "loop.sample_every",
        "loop.sample_prompt",
        "loop.sample_tokens",
        "loop.seconds",
        "loop.threads",
        "parallel.cp",
        "parallel.shard",
        "parallel.timeout",
        "parallel.tp",
    }
)

SECTIONS: dict[str, type] = get_type_hints(Recipe)
KINDS: dict[str, Any] = {
    f"{section}.{name}": kind
    for section, owner in SECTIONS.items()
    for name, kind in get_type_hints(owner).items()
}


def load_recipe(file: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Build a recipe from a TOML file and from overrides, which win.

    A value of an override is TOML; text that is no TOML is a string, so quotes may be left out.
    `"none"` empties an optional field, and one string stands for a list of one.

    Args:
        file: sections `data`, `model`, `optim`, `schedule`, `loop`, `parallel`; none means all
            defaults.
        overrides: such as "optim.lr=3e-4" or "model.ssm_cfg.d_state=64".

    Raises:
        ConfigError: the file cannot be read, a name is unknown, or a value does not fit.

    Example:
        >>> load_recipe(None, ["optim.name=muon", "data.window=64"]).optim.name
        'muon'
    """
    entries = {} if file is None else dict(_flatten(Path(file)))
    for text in overrides:
        _override(entries, text)
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in entries.items():
        section, _, key = name.partition(".")
        sections[section][key] = _convert(name, value)
    return Recipe(**{section: SECTIONS[section](**sections[section]) for section in SECTIONS})


def recipe_to_toml(recipe: Recipe) -> str:
    """Write a recipe so that it can be read again, defaults included, empty fields left out.

    Example:
        >>> load_recipe(None) == Recipe()
        True
        >>> recipe_to_toml(Recipe()).splitlines()[0]
        '[data]'
    """
    lines: list[str] = []
    for section in SECTIONS:
        tables: list[str] = []
        lines.append(f"[{section}]")
        for entry in fields(SECTIONS[section]):
            value = getattr(getattr(recipe, section), entry.name)
            if isinstance(value, dict):
                tables += [f"\n[{section}.{entry.name}]", *_pairs(value)] if value else []
            elif value is not None or entry.default is not None:
                lines += _pairs({entry.name: NOTHING if value is None else value})
        lines += [*tables, ""]
    return "\n".join(lines)


def recipe_difference(old: Recipe, new: Recipe) -> list[str]:
    """Say, a line per field, what keeps a run with `old` from being continued with `new`.

    Fields that decide only what is written down may differ, and so may `loop.steps` when the
    schedule is constant; they are not listed.

    Example:
        >>> recipe_difference(load_recipe(), load_recipe(None, ["optim.lr=1e-4"]))
        ['optim.lr: 0.002 -> 0.0001']
    """
    free = set(FREE_ON_RESUME)
    if old.schedule.kind == new.schedule.kind == "constant":
        free.add("loop.steps")
    found: list[str] = []
    for name in KINDS:
        section, key = name.split(".")
        before, after = getattr(getattr(old, section), key), getattr(getattr(new, section), key)
        if name not in free and before != after:
            found.append(f"{name}: {_word(before)} -> {_word(after)}")
    return found


def _flatten(file: Path) -> Iterator[tuple[str, Any]]:
    """Read a file as (section.field, value)."""
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{WHERE}: {str(file)!r} must be a readable file; {error}. Check the path."
        ) from error
    except ValueError as error:  # TOML and UTF-8 both
        raise ConfigError(
            f"{WHERE}: {str(file)!r} must hold TOML; {error}. Correct that place."
        ) from error
    for section, entries in tree.items():
        if section not in SECTIONS:
            raise ConfigError(
                f"{WHERE}: unknown section {section!r}; known: {', '.join(SECTIONS)}."
                f"{_near(section, SECTIONS)}"
            )
        if not isinstance(entries, dict):
            raise ConfigError(f"{WHERE}: {section} must be a table; got {entries!r}.")
        for key, value in entries.items():
            yield _known(f"{section}.{key}"), value


def _override(entries: dict[str, Any], text: str) -> None:
    utf8(f"{WHERE}: {text!r}", text)
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name:
        raise ConfigError(
            f"{WHERE}: an override must have the form a.b=c; got {text!r}. "
            "For example: optim.lr=1e-3"
        )
    parts = name.split(".")
    field = _known(".".join(parts[:2]))
    if get_origin(KINDS[field]) is dict and len(parts) == 3:
        table = entries.get(field, {})
        # A table that is no table is told of by `_convert`, with its name.
        if isinstance(table, dict):
            entries[field] = {**table, parts[2]: _parse(value)}
    elif len(parts) != 2:
        raise ConfigError(f"{WHERE}: unknown field {name!r}.{_near(name, KINDS)}")
    elif fits("", KINDS[field]):
        # The text itself, so that a folder may be called 2024.
        parsed = _parse(value)
        entries[field] = parsed if isinstance(parsed, str) else value
    else:
        entries[field] = _parse(value)


def _parse(text: str) -> Any:
    try:
        tree = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return tree["value"] if len(tree) == 1 else text


def _known(name: str) -> str:
    if name not in KINDS:
        raise ConfigError(f"{WHERE}: unknown field {name!r}.{_near(name, KINDS)}")
    return name


def _convert(name: str, value: Any) -> Any:
    """Give a value of a file the type of its field."""
    kind = KINDS[name]
    options = get_args(kind) if get_origin(kind) in UNIONS else (kind,)
    if value == NOTHING and NoneType in options:
        return None
    wants_list = any(get_origin(option) is tuple for option in options)
    if wants_list and isinstance(value, str):
        value = (value,)
    elif wants_list and isinstance(value, list):
        value = tuple(value)
    if not fits(value, kind):
        raise ConfigError(
            f"{WHERE}: {name} must be {expected_of(kind)}; got {value!r}. Correct it."
        )
    return float(value) if isinstance(value, int) and float in options else value


def _near(name: str, known: Any) -> str:
    # The right word in the wrong section is the commonest slip.
    word = name.rpartition(".")[2]
    close = [other for other in known if other.rpartition(".")[2] == word]
    close = close or difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(known)}."


def _word(value: Any) -> str:
    return NOTHING if value is None else _toml(value) if not isinstance(value, dict) else str(value)


def _pairs(entries: dict[str, Any]) -> list[str]:
    return [f"{_key(name)} = {_toml(value)}" for name, value in entries.items()]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """Write one value; its kinds are those that `fits` lets into a recipe."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's strings are TOML's, but for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)
