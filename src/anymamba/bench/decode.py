"""Decoding: one token after the other through whole models, against the rate of reading memory."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.bench.llama import LlamaFiles, llama_files
from anymamba.bench.token_limit import stored_bytes
from anymamba.models import MambaConfig, MambaLM, native_refusal, preset, quantize_lm

__all__ = [
    "FORMATS",
    "LLAMA",
    "OURS",
    "Decoding",
    "decode_figures",
]

FORMATS = ("float32", "bfloat16", "int8", "int4")
OURS, LLAMA = "anymamba", "llama.cpp"
# The same numbers, another order of sums, half types that one side rounds, and 8-bit activations
# before int4, which were seen to cost 6e-2 with random weights. llama.cpp is judged by the float32
# model, whatever it makes of its weights.
_TOLERANCE = {
    OURS: {"float32": 1e-4, "bfloat16": 5e-2, "int8": 1e-3, "int4": 1e-1},
    LLAMA: {"float32": 1e-3, "bfloat16": 5e-2, "int8": 5e-2, "int4": 5e-1},
}
# Tokens of one engine before it is the other's turn, and tokens before the first turn.
_TURN = 10
_GATE = 4


class Decoding(NamedTuple):
    """Seconds of one token for every row, and what had to be read for it.

    Attributes:
        model: name of the preset.
        format: of the weights.
        rows: that decode together.
        seconds: of every token.
        weight_bytes: of all weights that a token reads.
        state_bytes: of the state of all rows.
        error: of the logits against the modules, relative to the largest.
        engine: who decodes.
    """

    model: str
    format: str
    rows: int
    seconds: list[float]
    weight_bytes: int
    state_bytes: int
    error: float
    engine: str = OURS

    @property
    def ok(self) -> bool:
        """Whether the logits are those of the modules; else the time means nothing."""
        return self.error <= _TOLERANCE[self.engine][self.format]

    @property
    def median(self) -> float:
        """The median time of a step."""
        return statistics.median(self.seconds)

    @property
    def tail(self) -> float:
        """The slowest hundredth over the median."""
        ordered = sorted(self.seconds)
        return ordered[max(0, round(0.99 * len(ordered)) - 1)] / self.median

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows."""
        return self.rows / self.median

    @property
    def bytes_per_token(self) -> float:
        """What must be moved for one token of one row: weights once, the state in and out."""
        return self.weight_bytes / self.rows + 2 * self.state_bytes / self.rows

    def share(self, bandwidth: float) -> float:
        """Return the time of moving those bytes over the measured time.

        Example:
            >>> Decoding("", "int8", 1, [4.0], 2, 1, 0.0).share(bandwidth=2.0)
            0.5
        """
        return (self.weight_bytes + 2 * self.state_bytes) / bandwidth / self.median


def decode_figures(
    models: Sequence[str],
    formats: Sequence[str] = FORMATS,
    rows: Sequence[int] = (1, 8),
    *,
    tokens: int = 40,
    configs: dict[str, MambaConfig] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[list[Decoding]]:
    """Measure decoding with random weights, beside llama.cpp where it is and has the model.

    Args:
        models: names of presets.
        formats: any of `FORMATS`.
        rows: how many sequences decode together.
        tokens: how many are timed, after a few that are not.
        configs: other models than the presets of these names.
        tell: is told what happens.

    Yields:
        What was measured in turns: ours, and the peer's. Nothing where our decoder cannot run.
    """
    for name in models:
        config = (configs or {}).get(name) or preset(name)
        plain = _model(config, "float32")
        files = llama_files(plain)
        for form in formats:
            lm = plain if form == "float32" else _model(config, form)
            if native_refusal(lm, torch.zeros(1, dtype=torch.int64)) is not None:
                return
            for count in rows:
                tell(f"decoding of {name}, {form}, {count} rows")
                engines = {OURS: _our_engine(lm, count)}
                if isinstance(files, LlamaFiles):
                    engines[LLAMA] = _llama_engine(files, plain, form, count)
                seconds, errors = _take_turns(engines, count, config.vocab_size, tokens)
                yield [
                    Decoding(
                        name,
                        form,
                        count,
                        seconds[who],
                        engine.weight_bytes,
                        engines[OURS].state_bytes,
                        errors[who],
                        who,
                    )
                    for who, engine in engines.items()
                ]


class _Engine(NamedTuple):
    """Somebody who decodes: the next logits from the next ids, and what judges them."""

    step: Callable[[Tensor], Tensor]
    judge: MambaLM
    weight_bytes: int
    state_bytes: int = 0


def _model(config: MambaConfig, form: str) -> MambaLM:
    torch.manual_seed(0)
    lm = MambaLM(config, dtype=torch.bfloat16 if form == "bfloat16" else torch.float32)
    return quantize_lm(lm, form) if form.startswith("int") else lm


def _our_engine(lm: MambaLM, rows: int) -> _Engine:
    cache = lm.empty_cache(rows)
    return _Engine(
        lambda ids_b: lm.step_(ids_b, cache, impl="native"),
        lm,
        stored_bytes(lm),
        cache.nbytes,
    )


def _llama_engine(files: LlamaFiles, lm: MambaLM, form: str, rows: int) -> _Engine:
    model = files.open(form, rows=rows)
    return _Engine(model.step, lm, model.weight_bytes)


def _error(engine: _Engine, rows: int, vocabulary: int) -> tuple[float, Tensor]:
    """Return how far the logits of a few tokens are from those of the modules, and the next ids.

    A few, because the first token meets an empty state, in which no decay shows.
    """
    ids_bs = torch.arange(rows * _GATE).view(rows, _GATE) % vocabulary
    want_bw = engine.judge.prefill(ids_bs, num_last_tokens=1, impl="portable").logits[:, 0].float()
    logits_bw = [engine.step(ids_b) for ids_b in ids_bs.unbind(1)][-1].float()
    error = float((logits_bw - want_bw).abs().max() / want_bw.abs().max())
    return error, logits_bw[:, :vocabulary].argmax(-1)


@torch.inference_mode()
def _take_turns(
    engines: dict[str, _Engine], rows: int, vocabulary: int, tokens: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of every token of every engine, and the errors of their logits."""
    ids: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    seconds: dict[str, list[float]] = {who: [] for who in engines}
    for who, engine in engines.items():
        errors[who], ids[who] = _error(engine, rows, vocabulary)
    while any(len(times) < tokens for times in seconds.values()):
        for who, engine in engines.items():
            # The first token of a turn brings the caches and the threads back, and is not timed.
            for place in range(-1, min(_TURN, tokens - len(seconds[who]))):
                start = time.perf_counter()
                logits_bw = engine.step(ids[who])
                if place >= 0:
                    seconds[who].append(time.perf_counter() - start)
                ids[who] = logits_bw[:, :vocabulary].argmax(-1)
    return seconds, errors
