"""Training on several ranks: the losses of one process, on any number, through any death."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_runs import finish, is_alive, stop, torchrun, wait_for, words_of, workers
from run_recipes import losses, plant_corpus, tiny_recipe

from anymamba.errors import ConfigError
from anymamba.models import MambaLM
from anymamba.train import Batch, Trainer, part_of, read_metrics

gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available() or sys.platform != "linux",
    reason="needs gloo, and /proc to find ranks",
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """The files that all runs read."""
    return plant_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory) -> Path:
    """The folder of a run in one process, which the others are compared with."""
    out = tmp_path_factory.mktemp("alone") / "run"
    torch.set_num_threads(1)
    assert Trainer(tiny_recipe(corpus, out)).run().finished
    return out


def assert_same_run(expected: Path, actual: Path) -> None:
    """Losses and norms of every step agree to 1e-5, and so do the models that were written."""
    want, got = losses(expected), losses(actual)
    assert [entry[0] for entry in want] == [entry[0] for entry in got]
    for before, after in zip(want, got, strict=True):
        assert after == pytest.approx(before, rel=1e-5), (before, after)
    models = [MambaLM.from_pretrained(str(out / "model")) for out in (expected, actual)]
    for (name, x), (_, y) in zip(*(m.state_dict().items() for m in models), strict=True):
        # AdamW divides by the root of the second moment: where that is tiny, rounding shows.
        assert torch.allclose(x, y, atol=3e-5, rtol=1e-3), name


@gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, []),
        (2, ["parallel.shard=true"]),
        (2, ["parallel.tp=2"]),
        (4, ["parallel.cp=2"]),
    ],
    ids=["replicas", "shards", "heads", "sequences and replicas"],
)
def test_ranks_train_as_one_process(
    corpus: Path, alone: Path, tmp_path: Path, ranks: int, options: list[str]
):
    """Every step of a run on several ranks has the loss of the same run on one."""
    out = tmp_path / "run"
    finish(torchrun(corpus, out, ranks, *options), out)
    assert_same_run(alone, out)


@gloo
@pytest.mark.slow
def test_another_number_of_ranks_goes_on(corpus: Path, tmp_path: Path):
    """A checkpoint of 2 ranks with shards is gone on with by 4, by 1, and by a process alone."""
    constant = "schedule.kind=constant"
    expected, out = tmp_path / "expected", tmp_path / "run"
    assert Trainer(tiny_recipe(corpus, expected, constant)).run().finished
    # A schedule without an end may be given more steps when it goes on.
    for ranks, steps in ((2, 2), (4, 3), (1, 4)):
        options = (constant, f"loop.steps={steps}", "parallel.shard=true")
        finish(torchrun(corpus, out, ranks, *options), out)
    assert Trainer(tiny_recipe(corpus, out, constant), resume=True).run().finished
    assert_same_run(expected, out)


@gloo
@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_the_run_goes_on(corpus: Path, tmp_path: Path):
    """kill -9 of a rank: the others are gone within 60 s, and the restart has the same losses."""
    options = ("loop.steps=24", "loop.checkpoint_every=4", "parallel.timeout=20")
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "run"
    finish(torchrun(corpus, undisturbed, 2, *options), undisturbed)
    process = torchrun(corpus, out, 2, *options, restarts=1)
    try:
        wait_for(lambda: (out / "checkpoints" / "step-00000004").exists(), 90)
        before = workers(process)
        os.kill(before[-1], signal.SIGKILL)
        wait_for(lambda: not any(is_alive(pid) for pid in before), 60)
    except BaseException:
        stop(process)
        raise
    finish(process, out)
    starts = [entry for entry in read_metrics(out / "metrics.jsonl") if entry["kind"] == "start"]
    assert starts[-1]["resumed"]
    assert_same_run(undisturbed, out)


@gloo
@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_with_a_word(corpus: Path, tmp_path: Path):
    """A rank that stands still counts as lost after parallel.timeout, and the others say so."""
    out = tmp_path / "run"
    process = torchrun(corpus, out, 2, "loop.steps=5000", "parallel.timeout=5")
    try:
        wait_for(lambda: (out / "checkpoints" / "step-00000002").exists(), 90)
        os.kill(workers(process)[-1], signal.SIGSTOP)
        assert process.wait(60) != 0
    finally:
        stop(process)
    words = " ".join(words_of(out).read_text().split())
    assert "all 2 ranks must answer; rank 0 lost contact" in words
    assert "--resume" in words


def packed(*lengths: int) -> Batch:
    """A packed batch of numbered tokens."""
    borders = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.arange(int(borders[-1]))[None]
    return Batch(ids, ids, borders, None, None, 0.0)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(3, 1, 9, 2), (40,), (1, 1, 1, 1, 30)])
def test_parts_hold_every_sequence_once(rows: int, parts: int, lengths: tuple[int, ...]):
    """Whole sequences, each on one rank; what fills a row up counts nothing."""
    batch = packed(*lengths)
    seen: list[list[int]] = []
    for row in range(rows):
        ids, targets, borders = part_of(batch, row, rows, parts)
        assert ids.shape == targets.shape
        assert ids.shape[1] % parts == 0
        assert int(borders[-1]) == ids.shape[1]
        for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            counted = targets[0, begin:end]
            if bool((counted != -100).all()):
                seen.append(ids[0, begin:end].tolist())
            else:
                assert bool((counted == -100).all())
    whole = [
        batch.ids_bs[0, a:b].tolist()
        for a, b in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
    ]
    assert seen == whole


def test_a_process_alone_is_told_how_to_start(corpus: Path, tmp_path: Path):
    """Asking for shared sequences without torchrun is refused, with the command."""
    with pytest.raises(ConfigError, match="torchrun"):
        Trainer(tiny_recipe(corpus, tmp_path / "run", "parallel.cp=2")).run()
