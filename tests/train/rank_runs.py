"""Runs under torchrun, on loopback, with as many ranks as asked for, and bounded in time."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from run_recipes import tiny_overrides

from anymamba.train import RunFolder

LIMIT = 240  # imports of four ranks on a machine that is busy otherwise


def torchrun(
    corpus: Path, out: Path, ranks: int, *more: str, restarts: int = 0
) -> subprocess.Popen[str]:
    """Start `torchrun -m anymamba train RECIPE --resume`; its words go to a file beside the run."""
    # With a recipe --resume may begin a run: torchrun restarts a command as it was given.
    recipe = out.with_suffix(".toml")
    recipe.write_text("")
    sets = [word for text in tiny_overrides(corpus, out, *more) for word in ("--set", text)]
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run"),
        *("--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(ranks), "--max-restarts", str(restarts)),
        *("-m", "anymamba", "train", str(recipe), *sets, "--resume"),
    ]
    path = os.pathsep.join(place for place in sys.path if place)
    environment = os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with open(words_of(out), "a") as stream:
        return subprocess.Popen(
            command, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )


def words_of(out: Path) -> Path:
    """Return the file of what the processes of a run have written."""
    return out.with_suffix(".log")


def finish(process: subprocess.Popen[str], out: Path) -> None:
    """Wait for a run that must succeed; nothing of it stays behind."""
    try:
        code = process.wait(LIMIT)
    finally:
        stop(process)
    assert code == 0, words_of(out).read_text()[-3000:]


def stop(process: subprocess.Popen[str]) -> None:
    """End a launcher and all that it started, which have sessions of their own."""
    if process.poll() is not None:
        return
    started = workers(process)
    process.kill()
    process.wait(10)
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def workers(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes that a launcher has started, in the order of their numbers."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(map(int, children))


def saved_step(out: Path) -> int:
    """Return the step of a run's newest checkpoint, 0 before there is one."""
    return max(RunFolder(out).checkpoints().steps(), default=0)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that only waits to be counted does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool], limit: float = 60.0) -> None:
    """Wait until something is true."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
