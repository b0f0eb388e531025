"""The law of resuming: killed and resumed equals never killed, to the last bit."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from run_recipes import finish, losses, plant_corpus, start, tiny_recipe, words

from anymamba.errors import CheckpointError, ConfigError
from anymamba.train import RunFolder, Trainer, compare_run

CASES = [(mode, name) for mode in ("packed", "carried") for name in ("adamw", "muon")]


def kill_after(process: Any, out: Path, step: int) -> None:
    """Send kill -9 as soon as the metrics show a step."""
    for _ in range(6000):
        seen = losses(out) if (out / "metrics.jsonl").exists() else []
        if seen and seen[-1][0] >= step:
            break
        assert process.exitcode is None, words(out)
        time.sleep(0.01)
    process.kill()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name"), CASES)
def test_killed_and_resumed_equals_straight(tmp_path, mode, name):
    """40 steps, and 20 + kill -9 + 20: every loss and every gradient norm has the same bits."""
    corpus = plant_corpus(tmp_path / "corpus")
    more = [f"data.mode={mode}", f"optim.name={name}", "loop.steps=40", "loop.checkpoint_every=10"]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    finish(start(corpus, straight, *more), straight)
    expected = losses(straight)
    assert [step for step, *_ in expected] == list(range(1, 41))
    # A checkpoint is written after step 20 is reported, so the kill may come before it is there:
    # then the run goes on from step 10, and the law is the same.
    kill_after(start(corpus, killed, *more), killed, 20)
    assert 20 <= len(losses(killed)) < 40
    finish(start(corpus, killed, *more, resume=True), killed)
    assert losses(killed) == expected


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_stopped_and_resumed_equals_straight(tmp_path, mode, name):
    """The same law within one process: a stop in the middle of an interval of reports."""
    corpus = plant_corpus(tmp_path / "corpus")
    more = [f"data.mode={mode}", f"optim.name={name}", "loop.accumulate=2", "loop.steps=8"]
    Trainer(tiny_recipe(corpus, tmp_path / "straight", *more)).run()
    halted = tiny_recipe(corpus, tmp_path / "halted", *more)
    trainer = Trainer(halted, watch=lambda e: trainer.request_stop() if e["step"] == 5 else None)
    assert not trainer.run().finished
    assert len(losses(tmp_path / "halted")) == 5
    assert Trainer(halted, resume=True).run().finished
    assert losses(tmp_path / "halted") == losses(tmp_path / "straight")
    old, new = (RunFolder(tmp_path / name) for name in ("straight", "halted"))
    weights = [(folder.model / "model.safetensors").read_bytes() for folder in (old, new)]
    assert weights[0] == weights[1]


def test_an_interval_of_reports_survives_an_interruption(tmp_path):
    """A mean over five steps is the same when the run stops after the third of them."""
    corpus = plant_corpus(tmp_path / "corpus")
    more = ["loop.steps=10", "loop.report_every=5", "loop.checkpoint_every=3"]
    Trainer(tiny_recipe(corpus, tmp_path / "straight", *more)).run()
    halted = tiny_recipe(corpus, tmp_path / "halted", *more)
    trainer = Trainer(halted, watch=lambda e: trainer.request_stop() if e["step"] == 3 else None)
    trainer.run()
    Trainer(halted, resume=True).run()
    assert len(losses(tmp_path / "straight")) == 2
    assert losses(tmp_path / "halted") == losses(tmp_path / "straight")


def test_a_changed_recipe_is_refused_with_the_difference(tmp_path):
    """Resuming with another learning rate says which field differs, and how."""
    corpus = plant_corpus(tmp_path / "corpus")
    Trainer(tiny_recipe(corpus, tmp_path / "run")).run()
    changed = tiny_recipe(corpus, tmp_path / "run", "optim.lr=0.5", "data.window=8")
    with pytest.raises(ConfigError, match=r"data\.window: 16 -> 8\n  optim\.lr: 0\.002 -> 0\.5"):
        Trainer(changed, resume=True).run()


def test_what_is_only_written_down_may_change(tmp_path):
    """How often to report or to save does not bind a resumed run."""
    corpus = plant_corpus(tmp_path / "corpus")
    Trainer(tiny_recipe(corpus, tmp_path / "run")).run()
    changed = tiny_recipe(corpus, tmp_path / "run", "loop.report_every=3", "loop.keep=1")
    assert Trainer(changed, resume=True).run().finished
    assert RunFolder(tmp_path / "run").saved_recipe().loop.keep == 1


def test_changed_data_is_refused(tmp_path):
    """A position in the data means nothing in other data."""
    corpus = plant_corpus(tmp_path / "corpus")
    recipe = tiny_recipe(corpus, tmp_path / "run")
    Trainer(recipe).run()
    (corpus / "3.txt").write_text("another text")
    with pytest.raises(CheckpointError, match="with the same tokens"):
        Trainer(recipe, resume=True).run()


def test_a_damaged_checkpoint_costs_only_its_own_steps(tmp_path, caplog):
    """The run goes on from the checkpoint before, says so, and ends with the same losses."""
    corpus = plant_corpus(tmp_path / "corpus")
    recipe = tiny_recipe(corpus, tmp_path / "run")
    Trainer(recipe).run()
    expected = losses(tmp_path / "run")
    newest = RunFolder(tmp_path / "run").checkpoints().path(6) / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"\0")
    Trainer(recipe, resume=True).run()
    assert "step 6 is damaged" in caplog.text
    assert losses(tmp_path / "run") == expected


def test_a_run_without_checkpoint_starts_again(tmp_path):
    """Killed before the first checkpoint, a run resumes from nothing."""
    corpus = plant_corpus(tmp_path / "corpus")
    recipe = tiny_recipe(corpus, tmp_path / "run")
    killed = RunFolder(tmp_path / "run")
    killed.claim(recipe, resume=False)
    killed.keep_recipe(recipe)
    killed.release()
    Trainer(recipe, resume=True).run()
    Trainer(tiny_recipe(corpus, tmp_path / "other")).run()
    assert losses(tmp_path / "run") == losses(tmp_path / "other")


def test_a_run_among_its_texts_is_no_text(tmp_path):
    """Run and tokens may lie in the folder of the texts: the run can be resumed and compared."""
    corpus = plant_corpus(tmp_path / "corpus")
    inside = [f"data.train={corpus}", "data.valid=[]", "data.valid_share=0.4"]
    inside.append(f"data.cache_dir={corpus / 'cache'}")
    recipe = tiny_recipe(corpus, corpus / "run", *inside, "loop.steps=2")
    assert Trainer(recipe).run().finished
    assert Trainer(recipe, resume=True).run().finished
    assert compare_run(RunFolder(corpus / "run"), order=2).held_out_files < 7


def test_a_run_that_went_on_is_not_compared(tmp_path):
    """Model and count of bytes must be of one moment, so an interrupted run has no comparison."""
    corpus = plant_corpus(tmp_path / "corpus")
    more = ["schedule.kind=constant", "loop.checkpoint_every=1"]
    Trainer(tiny_recipe(corpus, tmp_path / "run", *more, "loop.steps=2")).run()
    longer = tiny_recipe(corpus, tmp_path / "run", *more, "loop.steps=6")
    trainer = Trainer(
        longer, resume=True, watch=lambda e: trainer.request_stop() if e["step"] == 3 else None
    )
    assert not trainer.run().finished
    with pytest.raises(ConfigError, match="must hold a finished run"):
        compare_run(RunFolder(tmp_path / "run"), order=2)


def test_a_second_run_does_not_overwrite_the_first(tmp_path):
    """A folder that holds a run needs --resume."""
    corpus = plant_corpus(tmp_path / "corpus")
    recipe = tiny_recipe(corpus, tmp_path / "run")
    Trainer(recipe).run()
    with pytest.raises(ConfigError, match=r"holds one already\. Go on with --resume"):
        Trainer(recipe).run()


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    """The folder belongs to one run at a time, and is free when that one ends."""
    corpus = plant_corpus(tmp_path / "corpus")
    recipe = tiny_recipe(corpus, tmp_path / "run")
    first = RunFolder(tmp_path / "run")
    first.claim(recipe, resume=False)
    with pytest.raises(ConfigError, match="one process at a time"):
        Trainer(recipe, resume=True).run()
    first.release()
    assert Trainer(recipe, resume=True).run().finished


def test_an_unwritable_folder_is_refused_before_anything_is_read(tmp_path):
    """The message names the folder."""
    (tmp_path / "file").write_text("in the way")
    recipe = tiny_recipe(tmp_path / "no-corpus", tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match="must be a folder that can be written"):
        Trainer(recipe).run()
