"""Print what a token of a hybrid with attention costs in the decoder, in turns with the modules.

    python tools/measure_hybrid.py                               # two minutes

Twenty-four layers of width 768, Mamba-3 and every sixth attention, with random weights, after
prompts of several lengths: the keys and values of attention grow, and a token reads all of them.
The ideal is what must be moved at the rate of reading memory. An idle machine, please.
"""

import statistics
import time

import torch

from anymamba.bench import random_model, token_limit
from anymamba.models import MambaLM, hybrid_config
from anymamba.nn import ModelCache

CONFIG = hybrid_config(
    768, 24, vocab_size=50_277, d_intermediate=1536, ssm_cfg={"d_state": 128, "headdim": 64}
)
FORMATS, LENGTHS = ("float32", "bfloat16", "int8", "int4"), (16, 2048, 8192)
# Tokens of the decoder and of the modules in each turn; the first of them is not timed.
TURNS, TOKENS = 4, {"native": 9, "portable": 3}


@torch.inference_mode()
def token_seconds(lm: MambaLM, start: ModelCache) -> dict[str, float]:
    """Return the median seconds of a token, by who runs it."""
    caches = dict.fromkeys(TOKENS, start)
    seconds: dict[str, list[float]] = {impl: [] for impl in TOKENS}
    ids_b = torch.tensor([5])
    with lm.unchanged():
        for _ in range(TURNS):
            for impl, count in TOKENS.items():
                for place in range(count):
                    begin = time.perf_counter()
                    caches[impl] = lm.advance(ids_b, caches[impl], impl=impl).cache
                    if place > 0:
                        seconds[impl].append(time.perf_counter() - begin)
    return {impl: statistics.median(found) for impl, found in seconds.items()}


def main() -> None:
    """Measure and print."""
    print(f"{torch.get_num_threads()} threads; milliseconds of a token")
    print("weights   past    decoder  modules   ratio   ideal")
    for form in FORMATS:
        lm = random_model(CONFIG, form)
        for length in LENGTHS:
            ids_bs = torch.arange(length)[None] % CONFIG.vocab_size
            with torch.inference_mode():
                start = lm.prefill(ids_bs, num_last_tokens=1).cache
            native, portable = token_seconds(lm, start).values()
            limit = token_limit(lm, start)
            share = limit.share(1 / native)
            print(
                f"{form:8} {length:>5}  {1e3 * native:>8.2f} {1e3 * portable:>8.1f} "
                f"{portable / native:>6.1f}x {share:>6.0%} of {limit.bandwidth / 1e9:.0f} GB/s"
            )


if __name__ == "__main__":
    main()
