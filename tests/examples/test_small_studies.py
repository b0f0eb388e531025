"""The quick form of the studies: they run, leave a table and a picture, and repeat themselves."""

import importlib
import json

import pytest

pytestmark = pytest.mark.slow


def run_quickly(folder, study, *flags):
    # One process, whose output pytest sees, unless a test wants more.
    main = importlib.import_module(study).main
    main(["--quick", "--results", str(folder), "--jobs", "1", *flags])
    return json.loads((folder / "quick" / f"{study}.json").read_text())["cells"]


@pytest.mark.parametrize(
    ("study", "cells"), [("reset", 5), ("group_words", 14), ("language_models", 21)]
)
def test_quick_form_leaves_a_table_and_a_picture(study, cells, tmp_path, capsys):
    assert len(run_quickly(tmp_path, study)) == cells
    assert (tmp_path / "quick" / f"{study}.png").read_bytes().startswith(b"\x89PNG")
    first = capsys.readouterr().out
    assert "starts" in first
    run_quickly(tmp_path, study)
    again = capsys.readouterr().out
    assert "starts" not in again
    assert again in first


@pytest.mark.parametrize(
    ("study", "only"),
    [
        ("reset", "reset-majority"),
        ("group_words", "Q8 | fresh words | quaternion"),
        ("language_models", "Mamba-3 MIMO | 10 steps at 0.002"),
    ],
)
def test_two_runs_of_one_seed_agree(study, only, tmp_path):
    one = run_quickly(tmp_path / "one", study, "--only", only)
    other = run_quickly(tmp_path / "other", study, "--only", only)
    assert len(one) == 1
    assert {key: cell["result"] for key, cell in one.items()} == {
        key: cell["result"] for key, cell in other.items()
    }


@pytest.mark.parametrize("study", ["group_words", "language_models"])
def test_two_processes_find_what_one_finds(study, tmp_path):
    def results(folder, *flags):
        cells = run_quickly(tmp_path / folder, study, *flags)
        return {key: cell["result"] for key, cell in cells.items() if key != "cost"}

    assert results("one") == results("two", "--jobs", "2")
