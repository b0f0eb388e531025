"""The page of evidence holds the tables that the studies print."""

from pathlib import Path

import pytest

import group_words
import language_models
import reset
import state_tracking
from study import RESULTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence.md"


def blocks_of(text):
    """Return the tables of a text by their first lines."""
    tables = []
    for line in text.splitlines():
        if line.startswith("|") and tables and tables[-1][-1] != "":
            tables[-1].append(line)
        else:
            tables.append([line if line.startswith("|") else ""])
    return {lines[0]: lines[1:] for lines in tables if lines[0]}


@pytest.mark.parametrize(
    "study",
    [state_tracking, reset, group_words, language_models],
    ids=lambda study: study.__name__,
)
def test_a_table_on_the_page_is_the_one_its_study_prints(study, capsys, monkeypatch):
    """Line by line: none is missing on the page, and none is left of earlier results."""
    for draw in ("draw_bars", "draw_curves", "draw"):
        monkeypatch.setattr(study, draw, lambda *_, **__: None, raising=False)
    study.main(["--plot-only"])
    page, printed = blocks_of(PAGE.read_text()), blocks_of(capsys.readouterr().out)
    assert printed
    found = {head: page.get(head) for head in printed}
    assert found == printed, f"run the study's command with --plot-only; results lie in {RESULTS}"
