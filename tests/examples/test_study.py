"""What the studies share: cells are kept, runs resume, seeds decide."""

import multiprocessing
import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import study
import training
from report import spread
from study import Study, flags
from training import Run, Schedule, StudyError, seeded, train


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


def note(study, key, run):
    """Stand for work: leave a trace of who did it, and take a moment."""
    with (study.folder / "who.txt").open("a") as file:
        file.write(f"{key} {os.getpid()}\n")
    time.sleep(0.02)
    return {"x": 1}


def wait_for(file):
    """Return what a process writes there soon; starting one takes seconds."""
    deadline = time.monotonic() + 120
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline, f"nobody wrote {file.name}"
        time.sleep(0.05)
    return file.read_text()


def collect(study):
    """Ask for cells of which some need others, and one that wants the machine for itself."""
    if multiprocessing.parent_process() is not None:
        (study.folder / "helper.txt").write_text("here")
    elif not study.has_machine:
        wait_for(study.folder / "helper.txt")
    first = [study.cell(f"a {n}", {}, partial(note, study, f"a {n}")) for n in range(12)]
    second = []
    if all(first):
        second = [study.cell(f"b {n}", {}, partial(note, study, f"b {n}")) for n in range(12)]
    alone = study.cell("alone", {}, partial(note, study, "alone"), threads=None)
    return first + second, alone


def test_several_processes_fill_one_table(tmp_path):
    """Every cell is computed once, by whoever is free; the one that measures is the last."""
    cells, alone = open_study(tmp_path, "--jobs", "3").complete(collect)
    assert len(cells) == 24
    assert all(cells)
    assert alone == {"x": 1}
    keys, workers = zip(
        *(line.rsplit(" ", 1) for line in (tmp_path / "who.txt").read_text().splitlines()),
        strict=True,
    )
    assert len(set(keys)) == len(keys) == 25
    assert len(set(workers)) > 1
    assert (keys[-1], workers[-1]) == ("alone", str(os.getpid()))
    assert list((tmp_path / "unfinished").rglob("*.*")) == []
    assert open_study(tmp_path, "--plot-only", "--jobs", "3").complete(collect) == (cells, alone)


def test_a_cell_in_other_hands_is_waited_for(tmp_path, monkeypatch):
    """Two commands that ask for the same cell compute it once."""
    ours, theirs = open_study(tmp_path), open_study(tmp_path)
    seen = []

    def compute(run):
        seen.append(ours.cell("a", {}, lambda run: {"x": 2}))
        return {"x": 1}

    assert theirs.cell("a", {}, compute) == {"x": 1}
    assert seen == [None]
    assert ours.met_others
    monkeypatch.setattr(time, "sleep", seen.append)
    results = iter([True, False])

    def walk(study):
        study.met_others = next(results)
        return study.cell("a", {}, lambda run: {"x": 2})

    assert ours.fill(walk) == {"x": 1}
    assert seen[1:] == [study.SECONDS_BETWEEN_LOOKS]


def fail_in_helpers(study):
    """Stand for a mistake that only some processes meet."""
    if multiprocessing.parent_process() is not None:
        raise RuntimeError("no room on this device")
    return 1


def test_a_helper_that_fails_is_told(tmp_path):
    with pytest.raises(StudyError, match="--jobs 1"):
        open_study(tmp_path, "--jobs", "2").complete(fail_in_helpers)


def last_long(study):
    """Keep a helper busy until somebody ends it."""
    if os.getpid() != int((study.folder / "parent.txt").read_text()):
        (study.folder / "helper.txt").write_text(str(os.getpid()))
    time.sleep(120)


def run_long(folder):
    (folder / "parent.txt").write_text(str(os.getpid()))
    open_study(folder, "--jobs", "2").complete(last_long)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for a process where Linux lists them")
def test_helpers_end_with_their_parent(tmp_path):
    """A command that is killed leaves nobody behind who goes on computing."""
    parent = multiprocessing.get_context("spawn").Process(target=run_long, args=(tmp_path,))
    parent.start()
    helper = Path("/proc") / wait_for(tmp_path / "helper.txt")
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 60
    while helper.exists():
        assert time.monotonic() < deadline, "the helper outlived its parent"
        time.sleep(0.05)


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
    assert folders[0] == (Path(given[1]) if given else study.RESULTS)
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
    monkeypatch.setattr(training, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    expected = learn(Run("whole", {}, tmp_path / "whole.pt"), 20)
    with pytest.raises(Interrupted):
        learn(Run("cut", {}, tmp_path / "cut.pt"), 20, stop_at=13)
    history, weight = learn(Run("cut", {}, tmp_path / "cut.pt"), 20)
    assert expected[0] == history
    assert torch.equal(expected[1], weight)


def test_a_checkpoint_of_another_setting_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
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
