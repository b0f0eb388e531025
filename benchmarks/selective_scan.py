"""Speed and memory of the portable selective scan beside a plain autograd loop over time.

    PYTHONPATH=src python benchmarks/selective_scan.py [--threads 2] [--rounds 5]

Times are medians of runs that alternate in one process. Intermediates are the peak of the bytes
that forward and backward allocate, minus outputs and gradients.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from anymamba.ops.selective_scan import selective_scan

Way = Callable[..., tuple[Tensor, Tensor]]
LENGTHS = (1024, 2048, 4096, 8192)


def loop(u_bsi: Tensor, dt_bsi: Tensor, a_ir: Tensor, b_bsr: Tensor, c_bsr: Tensor) -> tuple:
    """Run the recurrence over `unbind`, recorded by autograd: the baseline."""
    state_bir = torch.zeros(u_bsi.shape[0], *a_ir.shape)
    outputs = []
    tokens = zip(*(x.unbind(1) for x in (u_bsi, dt_bsi, b_bsr, c_bsr)), strict=True)
    for u_bi, dt_bi, b_br, c_br in tokens:
        decay_bir = torch.exp(dt_bi[:, :, None] * a_ir)
        state_bir = decay_bir * state_bir + (dt_bi * u_bi)[:, :, None] * b_br[:, None]
        outputs.append((state_bir @ c_br[:, :, None])[:, :, 0])
    return torch.stack(outputs, 1), state_bir


def inputs(length: int, channels: int, states: int, batch: int) -> list[Tensor]:
    """Return u, dt, a, b, c as leaves, in the ranges of a freshly initialised block."""
    random = torch.Generator().manual_seed(0)
    u_bsi = torch.randn(batch, length, channels, generator=random)
    dt_bsi = 0.001 + 0.099 * torch.rand(batch, length, channels, generator=random)
    a_ir = -torch.arange(1.0, states + 1).expand(channels, states).contiguous()
    b_bsr, c_bsr = (torch.randn(batch, length, states, generator=random) for _ in range(2))
    return [x.requires_grad_() for x in (u_bsi, dt_bsi, a_ir, b_bsr, c_bsr)]


def train(way: Way, leaves: list[Tensor], head_bsi: Tensor) -> list[Tensor]:
    """Run forward and backward once; return what a caller would keep."""
    y_bsi, final_bir = way(*leaves)
    return [y_bsi, final_bir, *torch.autograd.grad(y_bsi, leaves, head_bsi)]


def forward(way: Way, leaves: list[Tensor], head_bsi: Tensor) -> list[Tensor]:
    """Run the forward alone."""
    with torch.no_grad():
        return list(way(*leaves))


def medians(ways: dict[str, Way], task: Callable, rounds: int, *args: object) -> dict[str, float]:
    """Return the median seconds of each way, the ways taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            task(way, *args)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def intermediates(way: Way, leaves: list[Tensor], head_bsi: Tensor) -> int:
    """Return peak bytes allocated by one training pass, minus outputs and gradients."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = train(way, leaves, head_bsi)
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak - sum(x.nbytes for x in kept)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--channels", type=int, default=1536)
    parser.add_argument("--states", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    write = sys.stdout.write
    write(f"torch {torch.__version__}, {chosen.threads} threads, float32, batch {chosen.batch}, ")
    write(f"channels {chosen.channels}, states {chosen.states}\n")

    ways: dict[str, Way] = {"loop": loop, "portable": selective_scan}
    leaves = inputs(chosen.length, chosen.channels, chosen.states, chosen.batch)
    head_bsi = torch.randn(leaves[0].shape)
    for label, task in (("forward", forward), ("forward + backward", train)):
        times = medians(ways, task, chosen.rounds, leaves, head_bsi)
        ratio = times["loop"] / times["portable"]
        write(f"s {chosen.length} {label}: loop {times['loop'] * 1e3:.0f} ms, ")
        write(f"portable {times['portable'] * 1e3:.0f} ms, {ratio:.2f}x\n")
    needs = {name: intermediates(way, leaves, head_bsi) for name, way in ways.items()}
    share = needs["portable"] / needs["loop"]
    write(f"s {chosen.length} intermediates: loop {needs['loop'] / 2**20:.0f} MiB, ")
    write(f"portable {needs['portable'] / 2**20:.0f} MiB, {share:.1%}\n")
    for length in LENGTHS:
        leaves = inputs(length, chosen.channels, chosen.states, chosen.batch)
        head_bsi = torch.randn(leaves[0].shape)
        times = medians({"portable": selective_scan}, train, 3, leaves, head_bsi)
        write(f"s {length} portable forward + backward: {times['portable'] * 1e3:.0f} ms, ")
        write(f"{times['portable'] / length * 1e6:.1f} us per token\n")


if __name__ == "__main__":
    main()
