"""Print whether late tokens cost what early ones did, how evenly they come, what else costs time.

    python tools/measure_latency.py                              # three minutes
    python tools/measure_latency.py --preset mamba2-130m --quantize int8

The 100,000 tokens are those of a small model: its caches and its decoder are those of any other.
How evenly tokens come, what choosing one costs and how fast prompts are read, by `generate` and by
the modules at once, is measured on a published size. Weights are random: top-p alone then meets
flat logits, its slowest case. An idle machine, please: whatever else runs is in the slowest
hundredth.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from anymamba.bench import random_model
from anymamba.generate import stream
from anymamba.models import MambaConfig, MambaLM, preset

SMALL = MambaConfig(d_model=256, n_layer=4, vocab_size=4096, ssm_cfg={"layer": "Mamba2"})
WINDOW, EARLY, FEWEST = 1000, 100, 100
PROMPTS, TURNS = (1, 8, 32, 128, 512), 5
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


def described(seconds: Iterable[float]) -> str:
    """Say what a token takes, and how far the slowest hundredth is from it."""
    ordered = sorted(seconds)
    median, slow = statistics.median(ordered), ordered[round(0.99 * len(ordered)) - 1]
    return f"median {1e3 * median:.3f} ms, 99% within {slow / median:.2f}x of it"


class Speaker:
    """A sequence that is decoded greedily, token by token."""

    def __init__(self, lm: MambaLM) -> None:
        """Begin with an empty state."""
        self.lm, self.cache, self.ids_b = lm, lm.empty_cache(1), torch.tensor([1])

    @torch.inference_mode()
    def timed_token(self) -> float:
        """Decode a token; return its seconds."""
        start = time.perf_counter()
        logits_bw = self.lm.step_(self.ids_b, self.cache, impl="native")
        self.ids_b = logits_bw[:, : self.lm.config.vocab_size].argmax(-1)
        return time.perf_counter() - start

    def skip(self, count: int) -> "Speaker":
        """Decode tokens that nobody times."""
        for _ in range(count):
            self.timed_token()
        return self


def print_growth(lm: MambaLM, count: int) -> None:
    """Print late tokens of a long sequence beside early ones of another, taken in turns."""
    late = Speaker(lm).skip(EARLY)
    early_bytes = resident_bytes()
    late.skip(count - WINDOW - EARLY)
    grown = resident_bytes() - early_bytes
    early = Speaker(lm).skip(EARLY)
    pairs = [(early.timed_token(), late.timed_token()) for _ in range(WINDOW)]
    for first, seconds in zip((EARLY, count - WINDOW), zip(*pairs, strict=True), strict=True):
        print(f"  tokens {first:>7,} to {first + WINDOW:>7,}: {described(seconds)}")
    print(f"  memory: {early_bytes / MIB:.0f} MiB after {EARLY}, {grown / MIB:+.1f} MiB since")


def print_looking(lm: MambaLM, count: int) -> None:
    """Print what it costs to look at the weights at every token, which a promise saves."""
    looking, trusting, saved = Speaker(lm), Speaker(lm), []
    for _ in range(count):
        plain = looking.timed_token()
        with lm.unchanged():
            trusting.skip(1)  # the first one looks
            saved.append(plain - trusting.timed_token())
    print(f"  looking at the weights: {1e6 * statistics.median(saved):.0f} us of a token")


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


def print_choosing(lm: MambaLM, count: int) -> None:
    """Print the share of a token's time that is spent outside the model."""
    for name, options in WAYS.items():
        with clocked(lm) as inside:
            tokens = stream(lm, [1], max_new_tokens=count + 1, **options)
            next(tokens)  # chosen from the prompt's logits: nothing runs through the model
            inside.clear()  # the prompt of a quantised model may have
            whole = []
            for _ in range(count):
                start = time.perf_counter()
                next(tokens)
                whole.append(time.perf_counter() - start)
        outside = statistics.median(map(float.__sub__, whole, inside))
        share = outside / statistics.median(whole)
        print(f"  {name:38} {1e6 * outside:6.0f} us, {share:5.1%} of a token")


def print_prompts(lm: MambaLM) -> None:
    """Print how long prompts take: as generation reads them, in turns with modules at once."""
    for length in PROMPTS:
        ids = [place % lm.config.vocab_size for place in range(length)]
        ids_bs = torch.tensor([ids])
        ways = (
            lambda ids=ids: stream(lm, ids, max_new_tokens=0),
            lambda ids_bs=ids_bs: lm.prefill(ids_bs, num_last_tokens=1),
        )
        seconds = [[timed(way) for way in ways] for _ in range(TURNS)]
        read, at_once = map(statistics.median, zip(*seconds, strict=True))
        print(
            f"  {length:>5} tokens: {1e3 * read:8.1f} ms, {length / read:8.0f} tokens/s; "
            f"modules at once: {1e3 * at_once:8.1f} ms"
        )


@torch.no_grad()
def timed(run: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="mamba-130m", help="of how evenly and of choosing")
    parser.add_argument("--quantize", choices=("int8", "int4"), help="both models")
    parser.add_argument("--tokens", type=int, default=100_000, help="of the small model")
    parser.add_argument("--timed", type=int, default=1000, help="tokens of the published size")
    given = parser.parse_args()
    if given.tokens < EARLY + 2 * WINDOW or given.timed < FEWEST:
        raise SystemExit(
            f"--tokens must be at least {EARLY + 2 * WINDOW} and --timed at least {FEWEST}; got "
            f"{given.tokens} and {given.timed}"
        )
    form, threads = given.quantize or "float32", torch.get_num_threads()
    for name, config in (("a small model", SMALL), (given.preset, preset(given.preset))):
        lm = random_model(config, form)
        print(f"{name}, {form}, {threads} threads, {config.vocab_size:,} words")
        if config is SMALL:
            print_growth(lm, given.tokens)
            continue
        sequence = Speaker(lm).skip(FEWEST)
        seconds = [sequence.timed_token() for _ in range(given.timed)]
        print(f"  {given.timed:,} tokens: {described(seconds)}")
        print_looking(lm, given.timed // 4)
        print("  choosing a token, outside the model:")
        print_choosing(lm, given.timed // 4)
        print("  reading a prompt:")
        print_prompts(lm)


if __name__ == "__main__":
    main()
