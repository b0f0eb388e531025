"""What the studies share: cells are kept, runs resume, seeds decide."""

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import study as shared
from study import Run, Schedule, Study, StudyError, flags, seeded, spread, train


def open_study(folder, *arguments):
    return Study("small", flags("").parse_args(["--results", str(folder), *arguments]))


def test_a_cell_is_computed_once(tmp_path):
    calls = []
    for _ in range(2):
        result = open_study(tmp_path).cell("a", {"n": 1}, lambda run: calls.append(1) or {"x": 2})
        assert result == {"x": 2}
    assert len(calls) == 1


def test_a_cell_made_with_another_setting_is_refused(tmp_path):
    open_study(tmp_path).cell("a", {"n": (1, 2)}, lambda run: {"x": 2})
    assert open_study(tmp_path).cell("a", {"n": (1, 2)}, lambda run: {}) == {"x": 2}
    with pytest.raises(StudyError, match="remove the cell"):
        open_study(tmp_path).cell("a", {"n": (1, 3)}, lambda run: {"x": 3})


def test_only_and_plot_only_leave_cells_out(tmp_path):
    assert open_study(tmp_path, "--only", "b").cell("a", {}, lambda run: {"x": 1}) is None
    assert open_study(tmp_path, "--plot-only").cell("a", {}, lambda run: {"x": 1}) is None
    assert open_study(tmp_path, "--only", "a").cell("a", {}, lambda run: {"x": 1}) == {"x": 1}


def fill(folder, name, count):
    """Stand for a command that fills a part of the table."""
    study = open_study(folder)
    for place in range(count):
        study.cell(f"{name} {place}", {}, lambda run: {"x": 1})


def test_two_processes_may_share_a_file(tmp_path):
    processes = [
        multiprocessing.get_context("spawn").Process(target=fill, args=(tmp_path, name, 30))
        for name in "ab"
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(json.loads((tmp_path / "small.json").read_text())["cells"]) == 60


@pytest.mark.parametrize("threads", [1, None])
def test_cells_are_computed_on_one_thread(tmp_path, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = open_study(tmp_path).cell(
            "a", {}, lambda run: {"threads": torch.get_num_threads()}, threads=threads
        )
        assert found == {"threads": threads or 3}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("flag", [["--budget", "0"], ["--budget", "-1"], ["--budget", "inf"]])
def test_flags_without_sense_are_refused(flag, capsys):
    with pytest.raises(SystemExit):
        flags("").parse_args(flag)
    assert "must be a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("given", [[], ["--results", "elsewhere"]])
def test_a_short_run_is_never_taken_for_the_real_one(given):
    folders = [
        Study("small", flags("").parse_args([*arguments, *given])).folder
        for arguments in ([], ["--quick"], ["--budget", "0.5"], ["--budget", "0.1"])
    ]
    assert folders[0] == (Path(given[1]) if given else shared.RESULTS)
    assert len(set(folders)) == len(folders)


class Interrupted(Exception):
    """Stands for a power cut."""


def learn(run, steps, stop_at=None):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def loss_at(step):
        if step == stop_at:
            raise Interrupted
        return F.mse_loss(model(torch.randn(8, 3, generator=seeded(5, step))), torch.ones(8, 1))

    history = train(
        run,
        model,
        torch.optim.AdamW(model.parameters()),
        Schedule(steps, lambda step: 0.01 / (1 + step), evaluate_every=4),
        loss_at,
        lambda step: {"norm": model.weight.norm().item()},
    )
    return history, model.weight.detach()


def test_an_interrupted_run_ends_as_one_in_a_single_go(tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    expected = learn(Run("whole", {}, tmp_path / "whole.pt"), 20)
    with pytest.raises(Interrupted):
        learn(Run("cut", {}, tmp_path / "cut.pt"), 20, stop_at=13)
    history, weight = learn(Run("cut", {}, tmp_path / "cut.pt"), 20)
    assert expected[0] == history
    assert torch.equal(expected[1], weight)


def test_a_checkpoint_of_another_setting_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    with pytest.raises(Interrupted):
        learn(Run("cut", {"rate": 1}, tmp_path / "cut.pt"), 20, stop_at=13)
    with pytest.raises(StudyError, match=r"begun with .* remove the file"):
        learn(Run("cut", {"rate": 2}, tmp_path / "cut.pt"), 20)


def test_a_run_stops_when_it_is_good_enough(tmp_path):
    model = nn.Linear(1, 1)
    history = train(
        Run("early", {}, tmp_path / "early.pt"),
        model,
        torch.optim.SGD(model.parameters()),
        Schedule(100, lambda step: 0.1, evaluate_every=5),
        lambda step: model(torch.ones(1, 1)).square().sum(),
        lambda step: {"score": float(step)},
        enough=lambda measures: measures["score"] >= 10,
    )
    assert [measures["step"] for measures in history] == [5, 10]


def test_seeds_decide_the_data():
    def draw(*numbers):
        return torch.randint(2**40, (4,), generator=seeded(*numbers)).tolist()

    assert draw(0, 1) == draw(0, 1)
    assert len({tuple(draw(*numbers)) for numbers in [(0, 1), (1, 0), (0, 2), (0,), (1,)]}) == 5


def test_the_error_bar_is_the_range():
    assert spread([1.0, 2.0, 6.0]) == (3.0, 2.0, 3.0)
