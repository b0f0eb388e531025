"""The page of evidence holds the tables that the studies print."""

from pathlib import Path

import state_tracking
from study import RESULTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence.md"


def printed_table(main, capsys):
    main(["--plot-only"])
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]


def test_the_state_tracking_table_is_the_one_its_study_prints(capsys, monkeypatch):
    """Every number on the page comes out of the committed results."""
    monkeypatch.setattr(state_tracking, "draw_bars", lambda *_, **__: None)
    lines = PAGE.read_text().splitlines()
    missing = [line for line in printed_table(state_tracking.main, capsys) if line not in lines]
    assert missing == [], f"run the study's command with --plot-only; results lie in {RESULTS}"
