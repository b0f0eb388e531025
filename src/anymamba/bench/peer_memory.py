"""A peer's training step in a process of its own, which may not take all memory or all time.

What a step needs cannot be known before it runs, and a system without memory ends whoever asks
next. So the peer runs apart, under a limit that the system itself holds it to (RLIMIT_DATA): it
fails, and the bench goes on with a bound instead of a figure.

Its memory is what the system says the process held (Linux). The profiler, which counts ours, keeps
a record of every operation: for a loop over tokens those take more than the step.
"""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.bench.lms import prompt_ids, training_step
from anymamba.bench.memory import peak_and_result
from anymamba.bench.peers import their_lm
from anymamba.models import MambaConfig, MambaLM

__all__ = ["PeerStep", "StepMemory", "measure_step", "peer_step"]

_RUN = "from anymamba.bench.peer_memory import answer; answer()"
# What a process says when it is refused memory, and how the system ends one that took too much.
_REFUSED = (
    *("can't allocate memory", "Cannot allocate memory", "MemoryError", "bad_alloc"),
    # A thread whose stack is refused, and oneDNN.
    *("Resource temporarily unavailable", "could not create a primitive"),
)
_KILLED = -9


class PeerStep(NamedTuple):
    """One step of one sequence.

    Attributes:
        config: of the model; weights are drawn from seed 0, as the bench draws its own.
        length: tokens of the sequence.
        recomputes: whether layers are computed again in the backward.
        limit: bytes of data that the process may hold.
        threads: of torch.
    """

    config: MambaConfig
    length: int
    recomputes: bool
    limit: int
    threads: int


class StepMemory(NamedTuple):
    """What was measured of a step: bytes at once, seconds, loss."""

    peak: int
    seconds: float
    loss: float


def measure_step(run: Callable[[], Sequence[Tensor]]) -> StepMemory:
    """Run one step and measure it.

    Args:
        run: what `training_step` returned.
    """
    start = time.perf_counter()
    peak, results = peak_and_result(run)
    return StepMemory(peak, time.perf_counter() - start, float(results[0]))


def peer_step(step: PeerStep, seconds: float) -> StepMemory | str:
    """Measure a step of transformers, or say why it has no end here.

    Args:
        step: what to run.
        seconds: how long it is waited for.

    Raises:
        RuntimeError: the process failed, and not for want of memory.
    """
    command = [sys.executable, "-c", _RUN]
    try:
        done = subprocess.run(
            command, input=pickle.dumps(step), capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"one step, with the start of its process, was not over after {seconds:.0f} seconds"
    if done.returncode == 0:
        return StepMemory(*pickle.loads(done.stdout))
    told = done.stderr.decode(errors="replace")
    if done.returncode == _KILLED or any(word in told for word in _REFUSED):
        return f"one step needs more than {step.limit / 1e9:.1f} GB"
    raise RuntimeError(f"bench: a step of transformers failed:\n{told[-2000:]}")


def answer() -> None:
    """Read a `PeerStep` from stdin, run it, write peak, seconds and loss to stdout."""
    step: PeerStep = pickle.loads(sys.stdin.buffer.read())
    # Whatever else is printed must not mix with the answer.
    out = os.dup(1)
    os.dup2(2, 1)
    torch.set_num_threads(step.threads)
    torch.manual_seed(0)
    model = their_lm(MambaLM(step.config))
    assert not isinstance(model, str), model
    # It recomputes in training mode only, which changes nothing else in these models.
    if step.recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # pyright: ignore
    model.train(step.recomputes)
    ids_bs = prompt_ids(step.length, step.config.vocab_size)
    _limit_memory(step.limit)
    found = _measure_resident(training_step(model, lambda: model(ids_bs, labels=ids_bs).loss))
    os.write(out, pickle.dumps(tuple(found)))


def _measure_resident(run: Callable[[], Sequence[Tensor]]) -> StepMemory:
    """As `measure_step`, by the memory that the process has; elsewhere than on Linux the same."""
    process = Path("/proc/self")
    try:
        (process / "clear_refs").write_text("5")  # the peak begins anew
    except OSError:  # not Linux, or a container that keeps it from us
        return measure_step(run)

    def kilobytes(name: str) -> int:
        lines = (process / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

    before, start = kilobytes("VmRSS"), time.perf_counter()
    results = run()
    seconds = time.perf_counter() - start
    return StepMemory(1024 * (kilobytes("VmHWM") - before), seconds, float(results[0]))


def _limit_memory(limit: int) -> None:
    if sys.platform == "win32":
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
