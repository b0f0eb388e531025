"""Training on several ranks: the losses of one process, on any number, through any death."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_runs import finish, is_alive, saved_step, stop, torchrun, wait_for, words_of, workers
from run_recipes import losses, plant_corpus, tiny_recipe
from torch.distributed.checkpoint import load
from waiting_cases import CHECKS

from anymamba.errors import ConfigError
from anymamba.models import MambaLM
from anymamba.train import Batch, RunFolder, Trainer, part_of, read_metrics
from worlds import run_world

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
# This process reads a checkpoint alone, which is what is meant.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, []),
        (2, ["parallel.shard=true"]),
        (2, ["parallel.tp=2"]),
        (4, ["parallel.tp=2"]),
        (4, ["parallel.cp=2"]),
    ],
    ids=["replicas", "shards", "heads", "heads and replicas", "sequences and replicas"],
)
def test_ranks_train_as_one_process(
    corpus: Path, alone: Path, tmp_path: Path, ranks: int, options: list[str]
):
    """Every step of a run on several ranks has the loss of the same run on one.

    The model that it leaves has the bits of its last checkpoint, put together.
    """
    out = tmp_path / "run"
    finish(torchrun(corpus, out, ranks, *options), out)
    assert_same_run(alone, out)
    exported = MambaLM.from_pretrained(str(out / "model")).state_dict()
    gathered = {"model": {name: torch.zeros_like(x) for name, x in exported.items()}}
    saved = RunFolder(out).checkpoints()
    load(gathered, checkpoint_id=saved.path(saved_step(out)) / "shards", no_dist=True)
    for name, value in exported.items():
        assert torch.equal(gathered["model"][name], value), name


@gloo
@pytest.mark.slow
def test_whoever_goes_on_has_the_same_losses(corpus: Path, tmp_path: Path):
    """Shards on 2 ranks, then 4, then 1; heads on 2 ranks, then 4; alone before and after.

    The model that is left in the end is that of a process alone.
    """
    constant = "schedule.kind=constant"
    expected, out = tmp_path / "expected", tmp_path / "run"
    assert Trainer(tiny_recipe(corpus, expected, constant, "loop.steps=9")).run().finished
    # A schedule without an end may be given more steps when it goes on.
    heads = ("parallel.tp=2", "parallel.shard=false")
    plans: list[tuple[int, int, tuple[str, ...]]] = [
        (0, 2, ()),
        (2, 3, ("parallel.shard=true",)),
        (4, 4, ("parallel.shard=true",)),
        (1, 5, ("parallel.shard=true",)),
        (2, 6, heads),
        (4, 7, heads),
        (4, 8, (heads[0], "parallel.shard=true")),
        (0, 9, ()),
    ]
    for ranks, steps, options in plans:
        told = (constant, f"loop.steps={steps}", *options)
        if ranks:
            finish(torchrun(corpus, out, ranks, *told), out)
        else:
            assert Trainer(tiny_recipe(corpus, out, *told), resume=True).run().finished
    assert_same_run(expected, out)


@gloo
@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_the_run_goes_on(corpus: Path, tmp_path: Path):
    """kill -9 of a rank: the others are gone within 60 s, and the restart has the same losses."""
    # So many steps that a busy machine cannot end the run before the test looks at it.
    options = ("loop.steps=200", "loop.checkpoint_every=8")
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "run"
    finish(torchrun(corpus, undisturbed, 2, *options), undisturbed)
    process = torchrun(corpus, out, 2, *options, restarts=1)
    try:
        wait_for(lambda: saved_step(out) > 0, 120)
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
    process = torchrun(corpus, out, 2, "loop.steps=100000", "parallel.timeout=10")
    try:
        wait_for(lambda: saved_step(out) > 0, 120)
        os.kill(workers(process)[-1], signal.SIGSTOP)
        # torchrun asks the one that stands still to end, and waits 30 s before it makes it.
        assert process.wait(120) != 0
    finally:
        stop(process)
    words = " ".join(words_of(out).read_text().split())
    assert "all 2 ranks must answer; rank 0 lost contact" in words
    assert "--resume" in words


@gloo
@pytest.mark.slow
def test_ranks_wait_long_for_files_and_shortly_for_messages(tmp_path: Path):
    """Preparing data may outlast parallel.timeout; what the first rank cannot do, all refuse."""
    found = run_world(Path(__file__).with_name("waiting_cases.py"), 2, tmp_path)
    assert found == dict.fromkeys(CHECKS, 0.0)


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
