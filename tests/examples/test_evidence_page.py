"""The page of evidence holds the tables that the studies print."""

from pathlib import Path

import pytest

import group_words
import language_models
import reset
import state_tracking
from study import RESULTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence.md"


def printed_table(main, capsys):
    main(["--plot-only"])
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]


@pytest.mark.parametrize(
    "study",
    [state_tracking, reset, group_words, language_models],
    ids=lambda study: study.__name__,
)
def test_a_table_on_the_page_is_the_one_its_study_prints(study, capsys, monkeypatch):
    """Every number on the page comes out of the committed results."""
    for draw in ("draw_bars", "draw_curves", "draw"):
        monkeypatch.setattr(study, draw, lambda *_, **__: None, raising=False)
    lines = PAGE.read_text().splitlines()
    missing = [line for line in printed_table(study.main, capsys) if line not in lines]
    assert missing == [], f"run the study's command with --plot-only; results lie in {RESULTS}"
