"""Check that rooms are entered through their doors, and that the lower floors need only torch.

A room is a package or module directly below `anymamba`; its door is its `__init__.py`. Whoever
stands outside a room may import only the names the door lists in `__all__`. The foundations
(`notation`, `errors`, `settings`, `version`) are open. Tests may also look inside `ops`, because
they judge its kernels. The direction of the arrows between rooms is import-linter's business.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOUNDATIONS = {"notation", "errors", "settings", "version"}
TORCH_ONLY = FOUNDATIONS | {"ops", "nn", "models"}
# A kernel file may import its own compiler; it is loaded only when its device is in use.
COMPILERS = {"triton.py": "triton"}


class Import(NamedTuple):
    """One import statement, relative ones resolved: `from module import name`."""

    line: int
    module: str
    name: str | None


def imports_of(tree: ast.AST, package: str) -> Iterator[Import]:
    """List every import of a file that lies in `package`, lazy ones included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, None)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parts = package.split(".")
                base = parts[: len(parts) - node.level + 1]
                module = ".".join([*base, *([module] if module else [])])
            for alias in node.names:
                yield Import(node.lineno, module, alias.name)


@cache
def names_of_door(room: Path) -> frozenset[str]:
    """Read `__all__` of a room without importing it; empty when there is none."""
    door = room / "__init__.py" if room.is_dir() else room.with_suffix(".py")
    for node in ast.parse(door.read_text()).body if door.is_file() else []:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def problem_with(found: Import, own_room: str | None, in_tests: bool, house: Path) -> str | None:
    """Say which door an import walks past, or None."""
    parts = found.module.split(".")
    if parts[0] != "anymamba" or len(parts) == 1:
        return None
    room = parts[1]
    if room == own_room or room in FOUNDATIONS or (in_tests and room == "ops"):
        return None
    if len(parts) > 2:
        return f"{found.module} lies inside the room {room!r}; import from anymamba.{room}"
    if found.name is None or found.name in names_of_door(house / room):
        return None
    return f"{found.name!r} is not in __all__ of anymamba.{room}; the door does not offer it"


def third_party(found: Import, own_room: str | None, file: Path) -> str | None:
    """Say which foreign package a lower floor imports, or None."""
    top = found.module.split(".")[0]
    if own_room not in TORCH_ONLY or top in {"anymamba", "torch"}:
        return None
    if top in sys.stdlib_module_names or COMPILERS.get(file.name) == top:
        return None
    return f"{top!r} may not be imported here: up to models, torch is the only third party"


def problems(root: Path) -> list[str]:
    """List every violation below `root`, as `file:line: what`."""
    house = root / "src" / "anymamba"
    found: list[str] = []
    for folder in ("src", "tests", "tools", "examples", "docs"):
        for file in sorted((root / folder).rglob("*.py")):
            inside = file.is_relative_to(house)
            places = file.relative_to(house).with_suffix("").parts if inside else ()
            own_room = places[0] if places and places[0] != "__init__" else None
            package = ".".join(["anymamba", *places[:-1]])
            for item in imports_of(ast.parse(file.read_text()), package):
                for what in (
                    problem_with(item, own_room, folder == "tests", house),
                    third_party(item, own_room, file),
                ):
                    if what:
                        found.append(f"{file.relative_to(root)}:{item.line}: {what}.")
    return found


def main() -> int:
    """Check the repository this script lies in."""
    found = problems(Path(__file__).resolve().parents[1])
    print("\n".join(found) or "doors: every room is entered through its door")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
