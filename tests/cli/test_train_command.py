"""Laws of `train`, `compare` and `demo`: what they print, what they refuse, how they end."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest
from cli_schemas import SCHEMAS, problems

from anymamba.cli import main
from anymamba.train import read_metrics

TEXT = "".join(f"def f{n}(x):\n    return x + {n * n}\n\n" for n in range(200))
SIZES = [
    "data.window=16",
    "data.batch=2",
    "model.d_model=16",
    "model.n_layer=1",
    "model.d_intermediate=0",
    "model.ssm_cfg.headdim=8",
    "model.ssm_cfg.d_state=8",
    "schedule.warmup=2",
]


@pytest.fixture
def sets(tmp_path) -> list[str]:
    """Return the arguments that make a command small."""
    (tmp_path / "text.py").write_text(TEXT)
    changes = [*SIZES, f"data.train={tmp_path / 'text.py'}", "loop.sample_tokens=8"]
    return [word for change in changes for word in ("--set", change)]


def train(sets: list[str], out, *more: str) -> list[str]:
    """Return the arguments of a tiny run."""
    words = [
        word for text in (f"loop.out={out}", "loop.steps=4", *more) for word in ("--set", text)
    ]
    return ["train", *sets, *words]


def test_train_and_compare_say_what_happened(run, sets, tmp_path, monkeypatch, memory_settings):
    """Lines of text for people, a document by the schema for machines, and files where promised."""
    monkeypatch.chdir(tmp_path)
    result = run(*train(sets, "run"))
    assert result.code == 0, result.err
    assert memory_settings == [True]
    assert "Held out:" in result.out
    assert "\x1b" not in result.out
    for name in ("model", "loss.png", "report.md", "recipe.toml", "metrics.jsonl"):
        assert (tmp_path / "run" / name).exists(), name
    compared = run("compare", "run", "--json")
    assert problems(SCHEMAS["compare"], compared.document) == []
    # Four steps teach less than counting: exit code 1 says so.
    assert (compared.code, compared.document["ok"]) == (1, False)
    compared = run("compare", "run")
    assert "more bits" in compared.out
    assert max(map(len, compared.out.splitlines())) <= 80
    document = run(*train(sets, "again"), "--json").document
    assert problems(SCHEMAS["train"], document) == []
    assert document["step"] == 4


def test_a_run_goes_on_with_the_recipe_it_has(run, sets, tmp_path):
    """`--resume` alone finds the saved recipe; a change of it is refused with the difference."""
    out = tmp_path / "run"
    assert run(*train(sets, out)).code == 0
    refused = run(*train(sets, out))
    assert refused.code == 2
    assert "--resume" in refused.err
    assert run("train", "--resume", "--set", f"loop.out={out}").code == 0
    changed = run("train", "--resume", "--set", f"loop.out={out}", "--set", "optim.lr=0.7")
    assert changed.code == 2
    assert "optim.lr: 0.002 -> 0.7" in changed.err


def test_describe_prints_owners_and_trains_nothing(run, sets, tmp_path):
    """Which optimiser owns which parameter, and the whole recipe."""
    result = run(*train(sets, tmp_path / "run", "optim.name=muon"), "--describe")
    assert result.code == 0
    assert "[optim]" in result.out
    assert "in_proj.weight" in result.out
    assert not (tmp_path / "run").exists()
    result = run(*train(sets, tmp_path / "run"), "--describe", "--json")
    assert problems(SCHEMAS["train"], result.document) == []


def test_mistakes_have_a_reason(run, sets, tmp_path):
    """An unknown field, and a folder without a run: exit code 2 and what to do."""
    result = run("train", "--set", "optim.rate=1")
    assert result.code == 2
    assert "unknown field 'optim.rate'" in result.err
    result = run("compare", tmp_path)
    assert result.code == 2
    assert "there is no run in" in result.err
    result = run("train", "--resume", "--set", f"loop.out={tmp_path / 'typo-run'}")
    assert result.code == 2
    assert "there is no run in" in result.err
    assert not (tmp_path / "typo-run").exists()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("loop.device=bogus", "device must be one that this torch can use; got 'bogus'"),
        ("model.ssm_cfg.headdim=7", "headdim"),
        ("model.ssm_cfg.d_state=abc", "must describe a model"),
    ],
)
def test_a_start_that_fails_leaves_the_folder_free(run, sets, tmp_path, wrong, reason):
    """What cannot be built is refused with a reason, and the corrected command is not."""
    result = run(*train(sets, tmp_path / "run", wrong))
    assert result.code == 2
    assert reason in result.err
    assert not (tmp_path / "run" / "recipe.toml").exists()


def test_the_demo_trains_verifies_writes_and_compares(run, sets, tmp_path, monkeypatch):
    """Every part is announced and everything is equal; an older demo makes room for the next."""
    monkeypatch.chdir(tmp_path)
    result = run("demo", "--seconds", "0.2", "--out", "d", *sets)
    assert result.code == 0, result.err + result.out
    for promise in ("1. ", "2. ", "3. ", "4. ", "All equal", "the same text", "Witten-Bell"):
        assert promise in result.out
    assert "NOT EQUAL" not in result.out
    assert (tmp_path / "d" / "loss.png").is_file()
    result = run("demo", "--seconds", "0.1", "--out", "d", "--json", *sets)
    assert result.code == 0, result.err
    assert problems(SCHEMAS["demo"], result.document) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    result = run("demo", "--out", "mine", *sets)
    assert result.code == 2
    assert "it holds something else" in result.err
    assert (tmp_path / "mine" / "diary.txt").is_file()


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_run_that_can_be_resumed(sets, tmp_path):
    """One Ctrl-C: the step is finished, a checkpoint is written, the exit code is 130."""
    out = tmp_path / "run"
    words = train(sets, out, "loop.steps=100000", "loop.report_every=1", "schedule.kind=constant")
    path = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "anymamba", *words],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(12_000):
        if (out / "metrics.jsonl").exists() and len(read_metrics(out / "metrics.jsonl")) > 3:
            break
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "--resume" in text
    last = read_metrics(out / "metrics.jsonl")[-1]
    assert (last["kind"], last["finished"]) == ("end", False)
    assert (out / "checkpoints" / f"step-{last['step']:08}").is_dir()


def test_a_terminal_sees_a_live_picture(sets, tmp_path, monkeypatch):
    """On a terminal the curve, the progress and the speed are redrawn; in a pipe they are lines."""
    leader, follower = pty.openpty()
    shown: list[bytes] = []
    # A terminal holds a few kilobytes: somebody has to read while the command writes.
    reader = threading.Thread(target=_read_all, args=(leader, shown), daemon=True)
    reader.start()
    with os.fdopen(follower, "w") as screen:
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr(sys, "stdout", screen)
        code = main(train(sets, tmp_path / "run", "loop.report_every=1", "loop.sample_every=2"))
    reader.join(timeout=60)
    os.close(leader)
    text = b"".join(shown).decode(errors="replace")
    assert code == 0
    for promise in ("Mamba-3", "bits per byte over steps", "step 4 of 4", "of ideal", "held out"):
        assert promise in text
    assert "\x1b[" in text


def _read_all(leader: int, shown: list[bytes]) -> None:
    """Read a terminal until the last writer has left it."""
    try:
        while piece := os.read(leader, 65536):
            shown.append(piece)
    except OSError:  # how Linux says that there is no writer any more
        return


def test_lines_are_few(run, sets, tmp_path, monkeypatch):
    """Where no terminal is, reports become a line now and then, and events always do."""
    many = ["loop.steps=12", "loop.report_every=1", "loop.evaluate_every=6"]
    lines = run(*train(sets, tmp_path / "few", *many)).out.splitlines()
    # Twelve steps take less than the ten seconds between lines.
    assert sum("of ideal" in line for line in lines) <= 3
    assert sum("held out" in line for line in lines) == 2
    monkeypatch.setattr("anymamba.cli.train_display.LINE_SECONDS", 0.0)
    lines = run(*train(sets, tmp_path / "many", *many)).out.splitlines()
    assert sum("of ideal" in line for line in lines) == 12
