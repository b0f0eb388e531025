"""The table of costs in the documents is the one its tool prints, as far as no clock is needed."""

from pathlib import Path

import pytest

from measure_composition import BASES, FEATURES, Feature, static_cells

PAGE = Path(__file__).resolve().parents[1] / "docs" / "composition.md"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_every_feature_is_in_the_documents(feature: Feature):
    """Name, example, what it stands beside and the parameters agree, number by number."""
    assert feature.beside in BASES
    rows = [
        line for line in PAGE.read_text().splitlines() if line.startswith(static_cells(feature))
    ]
    assert len(rows) == 1
    assert rows[0].endswith(f"| {feature.grows_with} |")


def test_the_documents_have_no_other_row():
    """A feature that the tool does not measure is not in its table."""
    head = "| feature | one-line example |"
    table = PAGE.read_text().partition(head)[2].partition("\n\n")[0].splitlines()
    assert len(table) == 2 + len(FEATURES)
