"""Check that tensor names spell their layout where a layout is compulsory: einsum and doors.

    torch.einsum("bnlhp,bnlhr->bnhpr", x_bnlhp, b_bnlhr)    operand names end in their subscripts
    state_bnhpr = torch.einsum(...)                         and so does the name it is assigned to
    bind_dims("ssd", x_bshp=..., a_h=...)                   every letter is in the legend

Operands that are expressions and subscripts that are not literals are passed over. English words
such as *bias* are spelled from legend letters too, so names elsewhere are not judged.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from anymamba.notation import LEGEND, layout_of

LETTERS = set(LEGEND) | {letter.upper() for letter in LEGEND}


def called(node: ast.AST) -> str | None:
    """Return the last part of the called name, such as `einsum` for `torch.einsum(...)`."""
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else None


def unknown_letters(letters: str) -> str:
    """Return the letters that the legend does not explain."""
    return "".join(sorted({letter for letter in letters if letter not in LETTERS}))


def misspelled(operand: ast.expr, subscripts: str) -> str | None:
    """Say how a plain name differs from its subscripts, or None."""
    if not isinstance(operand, ast.Name):
        return None
    layout = subscripts.replace("...", "")
    spelled = layout_of(operand.id) if "_" in operand.id else ""
    # With an ellipsis the name has more axes than the subscripts spell.
    agrees = spelled.endswith(layout) if "..." in subscripts else spelled == layout
    return None if agrees else f"{operand.id} must end in _{layout}"


def judge_einsum(call: ast.Call, target: ast.expr | None) -> Iterator[str]:
    """Say what is wrong with one einsum call and the name it is assigned to."""
    first = call.args[0] if call.args else None
    if not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
        return
    left, arrow, right = first.value.replace(" ", "").partition("->")
    if not arrow:
        yield f"einsum {first.value!r} must write its output after '->'"
        return
    if unknown := unknown_letters((left + right).replace(",", "").replace("...", "")):
        yield f"einsum {first.value!r} uses {unknown!r}, which the legend does not explain"
    operands = call.args[1:]
    inputs = left.split(",")
    if not any(isinstance(operand, ast.Starred) for operand in operands):
        if len(inputs) != len(operands):
            yield f"einsum {first.value!r} names {len(inputs)} operands; got {len(operands)}"
        for operand, subscripts in zip(operands, inputs, strict=False):
            if what := misspelled(operand, subscripts):
                yield f"einsum operand {what}"
    if target is not None and (what := misspelled(target, right)):
        yield f"einsum result {what}"


def judge_bind_dims(call: ast.Call) -> Iterator[str]:
    """Say which keywords of a bind_dims call do not spell a layout."""
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg == "where":
            continue
        letters = "".join(c for c in layout_of(keyword.arg) if not c.isdigit())
        if "_" not in keyword.arg:
            yield f"bind_dims argument {keyword.arg} must end in _<layout>"
        elif unknown := unknown_letters(letters):
            yield f"bind_dims argument {keyword.arg} uses {unknown!r}, which is not in the legend"


def problems_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """List line and text of every violation in one file."""
    targets: dict[ast.expr, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            targets[node.value] = node.targets[0]
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets[node.value] = node.target
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if called(node) == "einsum":
            for what in judge_einsum(node, targets.get(node)):
                yield node.lineno, what
        elif called(node) == "bind_dims":
            for what in judge_bind_dims(node):
                yield node.lineno, what


def problems(root: Path) -> list[str]:
    """List every violation below `root`, as `file:line: what`."""
    return [
        f"{file.relative_to(root)}:{line}: {what}."
        for folder in ("src", "tests", "examples")
        for file in sorted((root / folder).rglob("*.py"))
        for line, what in problems_in(ast.parse(file.read_text()))
    ]


def main() -> int:
    """Check the repository this script lies in."""
    found = problems(Path(__file__).resolve().parents[1])
    print("\n".join(found) or "names: every compulsory suffix spells its layout")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
