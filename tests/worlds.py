"""Small worlds: a few processes on one machine that talk over loopback, bounded in time.

A script of checks calls `main(checks)`; a test calls `run_world(script, size, folder)` and gets,
for each check, the worst number that any rank found. Further words choose checks by their names.
The processes are forks of one that has imported everything, have one thread each, and are gone when
the call returns.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

Check = Callable[[], float]
LIMIT = 300  # for all checks of a world, on a machine that is busy otherwise


def run_world(script: Path, size: int, folder: Path, *arguments: str) -> dict[str, float | str]:
    """Run a script's checks on `size` processes; return each one's worst error, or a traceback."""
    path = os.pathsep.join([str(Path(__file__).parent), *(place for place in sys.path if place)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(script), str(folder), str(size), *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT + 30, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, float | str] = {}
    for rank in range(size):
        for name, error in json.loads((folder / f"rank{rank}.json").read_text()).items():
            worst = found.get(name, 0.0)
            if isinstance(worst, float) and isinstance(error, float):
                found[name] = max(worst, error)
            else:
                found[name] = worst if isinstance(worst, str) else error
    return found


def main(checks: Mapping[str, Check]) -> None:
    """Fork the ranks, let each run all checks in the same order, and wait for them."""
    folder, size, words = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if words:
        checks = {n: check for n, check in checks.items() if any(word in n for word in words)}
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(folder, rank, size, checks)) for rank in range(size)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(LIMIT)
    finally:
        for process in ranks:
            process.kill()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks) != 0)


def _rank(folder: Path, rank: int, size: int, checks: Mapping[str, Check]) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    found: dict[str, float | str] = {}
    for name, check in checks.items():
        try:
            found[name] = float(check())
        except Exception:
            found[name] = traceback.format_exc()[-1500:]
            if "gloo" in found[name].lower():
                break  # the other ranks are at another message now
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def worst_of(expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]) -> float:
    """Return the largest error over the largest magnitude of each tensor; names must agree."""
    assert expected.keys() == actual.keys(), sorted(expected.keys() ^ actual.keys())
    worst = 0.0
    for name, want in expected.items():
        got = actual[name]
        assert want.shape == got.shape, (name, want.shape, got.shape)
        gap = (want.detach().double() - got.detach().double()).abs().max()
        scale = want.detach().double().abs().max().clamp(min=1e-3)
        assert bool(torch.isfinite(gap)), name
        worst = max(worst, float(gap / scale))
    return worst
