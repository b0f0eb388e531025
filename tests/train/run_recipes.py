"""Tiny runs for the tests of the loop: a corpus, recipes for it, processes that can be killed."""

import contextlib
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from anymamba.cli import main
from anymamba.train import Recipe, load_recipe, read_metrics

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def plant_corpus(folder: Path) -> Path:
    """Write a few files of different lengths, always the same ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(6):
        text = " ".join(WORDS[(3 * i + number * i * i) % 10] for i in range(40 + 50 * number))
        (folder / f"{number}.txt").write_text(text + "\n")
    (folder / "held.txt").write_text(" ".join(WORDS * 6))
    return folder


def plant_tokenizer(file: Path, table: dict[str, int]) -> str:
    """Write a tokenizer of whole words, "?" for all that the table does not hold; returns its path.

    The word "</s>" of the table ends a text.
    """
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    file.parent.mkdir(parents=True, exist_ok=True)
    inner.save(str(file))
    return str(file)


def tiny_overrides(corpus: Path, out: Path, *more: str) -> list[str]:
    """Return the overrides of a run that takes a second."""
    files = json.dumps([str(corpus / f"{number}.txt") for number in range(6)])
    return [
        f"data.train={files}",
        f"data.valid={json.dumps([str(corpus / 'held.txt')])}",
        "data.window=16",
        "data.batch=2",
        "model.d_model=16",
        "model.n_layer=2",
        "model.d_intermediate=16",
        "model.ssm_cfg.headdim=8",
        "model.ssm_cfg.d_state=8",
        "schedule.warmup=2",
        "loop.steps=6",
        "loop.report_every=1",
        "loop.evaluate_every=0",
        "loop.checkpoint_every=2",
        "loop.sample_tokens=4",
        f"loop.out={out}",
        *more,
    ]


def tiny_recipe(corpus: Path, out: Path, *more: str) -> Recipe:
    """Return the recipe of a run that takes a second."""
    return load_recipe(None, tiny_overrides(corpus, out, *more))


def losses(out: Path) -> list[tuple[int, float, float]]:
    """Return what a run measured at each step: bits that must not depend on interruptions."""
    entries: list[dict[str, Any]] = read_metrics(out / "metrics.jsonl")
    return [(e["step"], e["loss"], e["grad_norm"]) for e in entries if e["kind"] == "step"]


def start(corpus: Path, out: Path, *more: str, resume: bool = False) -> Any:
    """Start `anymamba train` in a process of its own, with one thread; its words go to a file.

    The processes are forked from one that has imported torch and computed nothing: a test that
    starts twenty of them would otherwise spend its time importing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["run_recipes"])
    sets = [word for text in tiny_overrides(corpus, out, *more) for word in ("--set", text)]
    arguments = ["train", *sets, *(["--resume"] if resume else [])]
    process = context.Process(target=_train, args=(arguments, out.with_suffix(".log")))
    process.start()
    return process


def words(out: Path) -> str:
    """Return what the processes of a run have written."""
    return out.with_suffix(".log").read_text()


def finish(process: Any, out: Path) -> None:
    """Wait for a run that must succeed."""
    process.join(timeout=300)
    assert process.exitcode == 0, words(out)


def _train(arguments: list[str], log: Path) -> None:
    torch.set_num_threads(1)
    with open(log, "a") as stream, contextlib.redirect_stdout(stream):
        sys.stderr = stream
        sys.exit(main(arguments))
