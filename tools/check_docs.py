"""Check the documents: relative links lead somewhere, and python blocks run.

Links are followed in every document, anchors included. Blocks marked `python` are run in README.md
and docs/, the blocks of one document one after the other in one namespace, like a reader would.
"""

import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#+[ \t]+(.*?)[ \t]*#*$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:")


def documents(root: Path) -> list[Path]:
    """List the documents of the repository."""
    folders = [root / name for name in ("docs", "examples", "src")]
    return sorted([*root.glob("*.md"), *(file for f in folders for file in f.rglob("*.md"))])


def anchors_of(text: str) -> set[str]:
    """Return the anchors that a renderer makes from the headings."""
    anchors: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        repeat = 0
        while (anchor := words if repeat == 0 else f"{words}-{repeat}") in anchors:
            repeat += 1
        anchors.add(anchor)
    return anchors


def broken_links(document: Path) -> Iterator[str]:
    """Say which relative links of a document lead nowhere."""
    text = document.read_text()
    for target in LINK.findall(CODE.sub("", FENCE.sub("", text))):
        if SCHEME.match(target):
            continue
        path, _, anchor = target.partition("#")
        goal = document.parent / path if path else document
        if not goal.exists():
            yield f"link {target!r} leads nowhere"
        elif anchor and goal.suffix == ".md" and anchor not in anchors_of(goal.read_text()):
            yield f"link {target!r} names a heading that is not there"


def python_blocks(text: str) -> Iterator[tuple[int, str]]:
    """List line and source of every block marked `python`."""
    for match in FENCE.finditer(text):
        if match[1] == "python":
            yield text[: match.start(2)].count("\n"), match[2]


def failing_blocks(document: Path) -> Iterator[str]:
    """Run a document's blocks in order, in an empty folder; say which one fails."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        try:
            for line, source in python_blocks(document.read_text()):
                # Blank lines in front make the traceback's line numbers those of the document.
                code = compile("\n" * line + source, str(document), "exec")
                exec(code, namespace)
        except Exception:
            yield f"a python block fails\n{traceback.format_exc()}"
        finally:
            os.chdir(before)


def problems(root: Path) -> list[str]:
    """List every violation below `root`, as `file: what`."""
    found: list[str] = []
    for document in documents(root):
        name = document.relative_to(root)
        found += [f"{name}: {what}." for what in broken_links(document)]
        if name.parts[0] in ("README.md", "docs"):
            found += [f"{name}: {what}" for what in failing_blocks(document)]
    return found


def main() -> int:
    """Check the repository this script lies in."""
    found = problems(Path(__file__).resolve().parents[1])
    print("\n".join(found) or "docs: every link leads somewhere, every python block runs")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
