"""`kill -9` while checkpoints are written: the run always resumes, and no checkpoint is damaged."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from run_recipes import finish, losses, plant_corpus, start, words

from anymamba.train import CheckpointFolder

KILLS = 20


def wait_for_work(folder: Path, process: Any, out: Path) -> None:
    """Wait until the process has begun to write a checkpoint that was not there before."""
    before = set(folder.iterdir()) if folder.is_dir() else set()
    for _ in range(20_000):
        if folder.is_dir() and set(folder.iterdir()) - before:
            return
        assert process.exitcode is None, words(out)
        time.sleep(0.002)
    raise AssertionError("no checkpoint was begun")


@pytest.mark.slow
def test_twenty_kills_during_checkpointing_lose_no_checkpoint(tmp_path):
    """A checkpoint after every step, a kill somewhere in the writing, twenty times in a row."""
    corpus = plant_corpus(tmp_path / "corpus")
    # Wide enough that most of the time goes into writing and checking files.
    more = ["model.d_model=64", "loop.steps=400", "loop.checkpoint_every=1", "loop.keep=2"]
    out, draw = tmp_path / "run", random.Random(0)
    saved, reached = CheckpointFolder(out / "checkpoints"), 0
    for _ in range(KILLS):
        process = start(corpus, out, *more, resume=(out / "recipe.toml").exists())
        wait_for_work(saved.folder, process, out)
        time.sleep(draw.uniform(0.0, 0.15))
        process.kill()
        process.join(timeout=60)
        assert "damaged" not in words(out)
        steps = saved.steps()
        # Whatever has a name is whole, and the run never falls back behind what had one.
        assert all(saved.damage(step) is None for step in steps)
        assert not steps or steps[-1] >= reached
        reached = steps[-1] if steps else reached
    assert reached > 0
    assert reached < 400, "the run ended before the kills did; make it longer"
    finish(start(corpus, out, *more, f"loop.seconds={_spent(saved) + 0.5}", resume=True), out)
    seen = losses(out)
    assert [step for step, *_ in seen] == list(range(1, len(seen) + 1))
    assert not list(saved.folder.glob(".step-*.part"))


def _spent(saved: CheckpointFolder) -> float:
    newest = saved.newest()
    assert newest is not None
    return newest.facts["progress"]["seconds"]
