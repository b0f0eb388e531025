"""Measure what `grad_horizon` saves: peak memory and time of one training step by depth.

    python tools/measure_horizon.py                      the table of docs/composition.md
    python tools/measure_horizon.py --depths 16 64       other depths
    python tools/measure_horizon.py --check              exit code 1 if the promises do not hold

Each case runs in a process of its own. The peak is what the process held at most, minus what it
held before the step: parameters and input are not counted, activations and gradients are.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

SHARE, FLAT = 0.15, 1.2


def main() -> int:
    """Print the table; return 1 if a promise was checked and does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--horizon", type=int, default=4)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layer", default="Mamba3", choices=["Mamba1", "Mamba2", "Mamba3"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case is not None:
        sys.stdout.write(json.dumps(measure(json.loads(given.case))))
        return 0
    sizes = {name: vars(given)[name] for name in ("d_model", "batch", "length", "layer", "threads")}
    say = sys.stdout.write
    say(f"{sizes}, 2 sets of weights\n{'virtual layers':>14} {'grad_horizon':>12} ")
    say(f"{'peak MB':>8} {'of full':>8} {'seconds':>8}\n")
    peaks: dict[tuple[int, bool], float] = {}
    for depth in given.depths:
        for horizon in (given.horizon, None):
            case = {**sizes, "depth": depth, "horizon": horizon}
            found = in_own_process(case)
            peaks[depth, horizon is None] = found["peak_mb"]
            case_name = "full" if horizon is None else str(horizon)
            row = f"{depth:>14} {case_name:>12} {found['peak_mb']:>8.0f} "
            say(row + f"{'':>8} {found['seconds']:>8.2f}\n")
        say(f"{'':>14} {'':>12} {'':>8} {peaks[depth, False] / peaks[depth, True]:>8.1%}\n")
    return verdict(peaks, given.depths) if given.check else 0


def verdict(peaks: dict[tuple[int, bool], float], depths: list[int]) -> int:
    """Say whether the promises hold; return the exit code."""
    kept = [peaks[depth, False] for depth in depths]
    growth = max(kept) / min(kept)
    shares = {depth: peaks[depth, False] / peaks[depth, True] for depth in depths if depth >= 64}
    holds = growth <= FLAT and all(share <= SHARE for share in shares.values())
    sys.stdout.write(
        f"{'holds' if holds else 'DOES NOT HOLD'}: at most {SHARE:.0%} of full from 64 layers on "
        f"({', '.join(f'{share:.1%}' for share in shares.values())}), flat in depth within "
        f"{FLAT:.1f}x ({growth:.2f}x)\n"
    )
    return 0 if holds else 1


def in_own_process(case: dict[str, object]) -> dict[str, float]:
    """Return what a fresh process measured."""
    command = [sys.executable, "-W", "ignore", __file__, "--case", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def measure(case: dict[str, int | str | None]) -> dict[str, float]:
    """Return peak memory and seconds of one training step."""
    import torch

    from anymamba.nn import Stack, StackConfig, VirtualLayers

    torch.set_num_threads(int(case["threads"] or 1))
    torch.manual_seed(0)
    config = StackConfig(
        d_model=int(case["d_model"] or 0),
        n_layer=2,
        ssm_cfg={"layer": case["layer"]},
        virtual=VirtualLayers(int(case["depth"] or 0)),
        grad_horizon=case["horizon"],  # pyright: ignore[reportArgumentType]
    )
    stack = Stack(config)
    x_bsd = torch.randn(int(case["batch"] or 0), int(case["length"] or 0), config.d_model)
    x_bsd.requires_grad_()

    def step() -> float:
        start = time.perf_counter()
        stack(x_bsd).square().mean().backward()
        return time.perf_counter() - start

    # A short sequence first: one-time costs, such as thread pools, are not the step's.
    stack(x_bsd[:1, :8].detach()).sum().backward()
    before = resident()
    with Sampler() as sampler:
        seconds = step()
    return {"peak_mb": (sampler.peak - before) / 2**20, "seconds": seconds}


class Sampler:
    """Look at the resident memory every few milliseconds from a thread of its own."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.peak = 0
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Sampler":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.thread.join()
        self.peak = max(self.peak, resident())

    def _watch(self) -> None:
        while not self.is_over.wait(0.002):
            self.peak = max(self.peak, resident())


def resident() -> int:
    """Return the bytes of memory this process holds; Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


if __name__ == "__main__":
    sys.exit(main())
