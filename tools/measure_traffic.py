"""Measure what a context-parallel step sends, for shards of 1k to 64k tokens; prints a table.

python tools/measure_traffic.py [RANKS]

Processes of this machine share a sequence over loopback, and every one of them counts the bytes and
messages that it sends in a forward and a backward through one block.
"""

import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from anymamba.nn import Mamba, Mamba2, Mamba3, context_parallel

WIDTH = 16
LENGTHS = (1024, 4096, 16384, 65536)  # tokens per rank
MAMBA3: dict[str, Any] = {"d_model": WIDTH, "d_state": 16, "headdim": 8}
BLOCKS: dict[str, Callable[[], torch.nn.Module]] = {
    "Mamba-1": lambda: Mamba(WIDTH, d_state=8),
    "Mamba-2": lambda: Mamba2(WIDTH, d_state=16, headdim=8),
    "Mamba-3 SISO": lambda: Mamba3(**MAMBA3),
    "Mamba-3 MIMO": lambda: Mamba3(**MAMBA3, is_mimo=True, mimo_rank=2),
    "Mamba-3 quaternion": lambda: Mamba3(**MAMBA3, rotation="quaternion"),
}


def sent_in_a_step(name: str, length: int) -> tuple[int, int]:
    """Return the bytes and messages of this rank's forward and backward; all ranks call it."""
    torch.manual_seed(0)
    block = BLOCKS[name]()
    ring = context_parallel(block)
    block(torch.ones(1, length, WIDTH)).sum().backward()
    return ring.traffic.bytes, ring.traffic.messages


def _measure(folder: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    file = str(Path(folder) / "store")
    store = dist.FileStore(file, size)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    if rank == 0:
        print(f"{size} ranks; sent per step and rank in the order of the ranks: bytes (messages)\n")
    for name in BLOCKS:
        for length in LENGTHS:
            sent = sent_in_a_step(name, length)
            everybody: list[Any] = [None] * size
            dist.all_gather_object(everybody, sent)
            if rank == 0:
                words = ", ".join(f"{many:,} ({times})" for many, times in everybody)
                print(f"{name:20}{length:>8,} tokens per rank   {words}", flush=True)
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks and wait for them; returns the exit code."""
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start.Process(target=_measure, args=(folder, r, size)) for r in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
