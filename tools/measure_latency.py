"""Print whether a late token costs what an early one did, and what choosing a token costs.

    python tools/measure_latency.py                          # 100,000 tokens of a small model
    python tools/measure_latency.py --preset mamba2-130m --quantize int8 --tokens 3000

Random weights: neither depends on their values. An idle machine, please: the slowest hundredth of
the tokens is printed, and whatever else runs is in it.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from anymamba.generate import stream
from anymamba.models import MambaConfig, MambaLM, preset, quantize_lm

SMALL = MambaConfig(d_model=256, n_layer=4, vocab_size=32000, ssm_cfg={"layer": "Mamba2"})
WINDOW = 1000
WAYS = {
    "greedy": {},
    "temperature 0.8, top-k 40": {"temperature": 0.8, "top_k": 40},
    "temperature 0.8, top-k 40, top-p 0.95": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
}
MIB = 2**20


def resident_bytes() -> int:
    """Return the memory this process has now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@torch.inference_mode()
def print_latency(lm: MambaLM, count: int) -> None:
    """Decode many tokens; print the early ones beside the late ones."""
    cache, ids_b, seconds = lm.empty_cache(1), torch.tensor([1]), []
    early_bytes = 0
    for place in range(count):
        start = time.perf_counter()
        ids_b = lm.step_(ids_b, cache, impl="native")[:, : lm.config.vocab_size].argmax(-1)
        seconds.append(time.perf_counter() - start)
        if place == 100 + WINDOW:
            early_bytes = resident_bytes()
    for first in (100, count - WINDOW):
        part = sorted(seconds[first : first + WINDOW])
        median, slow = statistics.median(part), part[round(0.99 * len(part)) - 1]
        print(
            f"  tokens {first:>7,} to {first + WINDOW:>7,}: median {1e3 * median:.3f} ms, "
            f"99% within {slow / median:.2f}x of it"
        )
    grown = (resident_bytes() - early_bytes) / MIB
    print(f"  memory: {early_bytes / MIB:.0f} MiB after the early ones, {grown:+.1f} MiB since")


@contextmanager
def clocked(lm: MambaLM) -> Iterator[list[float]]:
    """Collect the seconds of every token inside the model."""
    plain, seconds = lm.advance, []

    def advance(*arguments, **options):
        start = time.perf_counter()
        result = plain(*arguments, **options)
        seconds.append(time.perf_counter() - start)
        return result

    lm.advance = advance
    try:
        yield seconds
    finally:
        del lm.advance


def print_sampling(lm: MambaLM, count: int) -> None:
    """Print the share of a token's time that is spent outside the model."""
    for name, options in WAYS.items():
        with clocked(lm) as inside:
            whole = []
            tokens = stream(lm, [1], max_new_tokens=count, **options)
            start = time.perf_counter()
            for _ in tokens:
                whole.append(time.perf_counter() - start)
                start = time.perf_counter()
        median, model = statistics.median(whole), statistics.median(inside)
        print(f"  {name:38} {1e6 * (median - model):6.0f} us, {1 - model / median:5.1%} of a token")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", help="a published size instead of a small model")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--tokens", type=int, default=100_000)
    given = parser.parse_args()
    if given.tokens < 200 + 2 * WINDOW:
        raise SystemExit(f"--tokens must be at least {200 + 2 * WINDOW}; got {given.tokens}")
    torch.manual_seed(0)
    lm = MambaLM(SMALL if given.preset is None else preset(given.preset))
    if given.quantize is not None:
        quantize_lm(lm, given.quantize)
    name = given.preset or "a small model"
    print(f"{name}, {given.quantize or 'float32'}, {torch.get_num_threads()} threads")
    print_latency(lm, given.tokens)
    print("choosing a token, outside the model:")
    print_sampling(lm, 300)


if __name__ == "__main__":
    main()
