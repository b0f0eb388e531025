"""The map from burn-mamba's names to ours leads somewhere, row by row."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "from-burn-mamba.md"
NAMES = sorted(set(re.findall(r"\| `(anymamba\.[\w.]+)` \|$", PAGE.read_text(), re.MULTILINE)))


def resolve(dotted):
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            fields = getattr(found, "__dataclass_fields__", {})
            found = fields[part] if part in fields else getattr(found, part)
        return found
    raise ModuleNotFoundError(dotted)


def test_the_page_has_rows():
    """The pattern that reads the page still matches it."""
    assert len(NAMES) > 50


@pytest.mark.parametrize("dotted", NAMES)
def test_name_exists(dotted):
    """Each name of the right column can be imported."""
    assert resolve(dotted) is not None
