"""Decoding: one token after the other through whole models, against the rate of reading memory."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.bench.gate import error_of, reason_of
from anymamba.bench.llama import LlamaFiles, llama_files
from anymamba.bench.machine import array_to_read, read_rate
from anymamba.bench.token_limit import stored_bytes
from anymamba.errors import BackendError
from anymamba.models import MambaConfig, MambaLM, preset, quantize_lm
from anymamba.ops import copy_to_large_pages, native_status

__all__ = [
    "FORMATS",
    "LLAMA",
    "OURS",
    "Decoding",
    "decode_figures",
    "random_model",
]

FORMATS = ("float32", "bfloat16", "int8", "int4")
OURS, LLAMA = "anymamba", "llama.cpp"
# The same numbers, another order of sums, half types that one side rounds, and 8-bit activations
# before int4, which were seen to cost 6e-2 with random weights. Before int8 they have 16 bits.
# llama.cpp is judged by the float32 model, whatever it makes of its weights.
_TOLERANCE = {
    OURS: {"float32": 1e-4, "bfloat16": 5e-2, "int8": 1e-3, "int4": 1e-1},
    LLAMA: {"float32": 1e-3, "bfloat16": 5e-2, "int8": 5e-2, "int4": 5e-1},
}
# Where the CPU multiplies bytes, int8 meets 8-bit activations too, and before int4 128 of them have
# one scale. With random weights of Mamba-3 the worst of a million logits was off by 6e-2 and 1e-1.
# The laws hold the kernel to its own rounding; here a wrong one must have no speed, and its logits
# are off by their own size.
_TOLERANCE_OF_BYTES = {"int8": 1e-1, "int4": 2e-1}
_MULTIPLY_BYTES = ("avx512_vnni", "avx512_bf16")
# Tokens of one engine before it is the other's turn, and tokens before the first turn.
_TURN = 10
_GATE = 4


class Decoding(NamedTuple):
    """Seconds of one token for every row, and what had to be read for it; or why there are none.

    Attributes:
        model: name of the preset.
        format: of the weights.
        rows: that decode together.
        seconds: of every token; none when it was not run.
        weight_bytes: of all weights that a token reads.
        state_bytes: of the state of all rows.
        rates: bytes per second of reading a large array before and after the turn of each token.
        error: of the logits against the modules, relative to the largest.
        engine: who decodes.
        why_not: why it was not run.
        variant: the instruction set of our kernels, if they decoded.
    """

    model: str
    format: str
    rows: int
    seconds: Sequence[float] = ()
    weight_bytes: int = 0
    state_bytes: int = 0
    rates: Sequence[float] = ()
    error: float = 0.0
    engine: str = OURS
    why_not: str = ""
    variant: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the logits are those of the modules, or it honestly did not run."""
        tolerance = _TOLERANCE[self.engine][self.format]
        if self.variant in _MULTIPLY_BYTES:
            tolerance = _TOLERANCE_OF_BYTES.get(self.format, tolerance)
        return self.error <= tolerance

    @property
    def has_speed(self) -> bool:
        """Whether it ran, and rightly: else no time means anything."""
        return bool(self.seconds) and self.ok

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

    @property
    def bandwidth(self) -> float:
        """The median rate of reading memory."""
        return statistics.median(self.rates)

    @property
    def share(self) -> float:
        """The time of moving those bytes over the measured time.

        Token by token, and the median of that: a virtual machine may read twice as fast from one
        second to the next, and each token has the memory of its own moment.

        Example:
            >>> Decoding("", "int8", 1, [4.0, 8.0, 4.0], 2, 1, rates=[2.0, 1.0, 2.0]).share
            0.5
        """
        moved = self.weight_bytes + 2 * self.state_bytes
        pairs = zip(self.seconds, self.rates, strict=True)
        return statistics.median(moved / rate / seconds for seconds, rate in pairs)


def decode_figures(
    models: Sequence[str],
    formats: Sequence[str] = FORMATS,
    rows: Sequence[int] = (1, 8),
    *,
    tokens: int = 120,
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
        What was measured in turns: ours, and the peer's. Who cannot run says why.
    """
    array = array_to_read()
    for name in models:
        config = (configs or {}).get(name) or preset(name)
        plain = random_model(config, "float32")
        files = llama_files(plain)
        for form in formats:
            lm = plain if form == "float32" else random_model(config, form)
            for count in rows:
                tell(f"decoding of {name}, {form}, {count} rows")
                engines = {
                    OURS: _our_engine(lm, count),
                    LLAMA: _llama_engine(files, plain, form, count),
                }
                started = {who: _start(engine, count) for who, engine in engines.items()}
                # As in `generate`, and as llama.cpp does.
                with lm.unchanged():
                    turns = _take_turns(started, array, tokens)
                state_bytes = lm.empty_cache(count).nbytes
                yield [
                    Decoding(name, form, count, engine=who, why_not=start)
                    if isinstance(start, str)
                    else Decoding(
                        name,
                        form,
                        count,
                        turns[who].seconds,
                        start.engine.weight_bytes,
                        state_bytes,
                        turns[who].rates,
                        start.error,
                        who,
                        variant=native_status().variant if who == OURS else None,
                    )
                    for who, start in started.items()
                ]


class _Engine(NamedTuple):
    """Somebody who decodes: the next logits from the next ids, and what judges them."""

    step: Callable[[Tensor], Tensor]
    judge: MambaLM
    weight_bytes: int


class _Started(NamedTuple):
    """An engine after its first tokens: how far its logits were off, and the ids that follow."""

    engine: _Engine
    error: float
    ids_b: Tensor


def random_model(config: MambaConfig, form: str) -> MambaLM:
    """Return a model with random weights in one of `FORMATS`, in memory as if it were loaded."""
    torch.manual_seed(0)
    lm = MambaLM(config, dtype=torch.bfloat16 if form == "bfloat16" else torch.float32)
    lm = quantize_lm(lm, form) if form.startswith("int") else lm
    for weight in (*lm.parameters(), *lm.buffers()):
        weight.data = copy_to_large_pages(weight.data)
    return lm


def _our_engine(lm: MambaLM, rows: int) -> _Engine:
    cache = lm.empty_cache(rows)
    return _Engine(lambda ids_b: lm.step_(ids_b, cache, impl="native"), lm, stored_bytes(lm))


def _llama_engine(files: LlamaFiles | str, lm: MambaLM, form: str, rows: int) -> _Engine | str:
    if isinstance(files, str):
        return files
    try:
        model = files.open(form, rows=rows)
    except BackendError as error:
        return reason_of(error)
    return _Engine(model.step, lm, model.weight_bytes)


@torch.inference_mode()
def _start(engine: _Engine | str, rows: int) -> _Started | str:
    """Run a few tokens and compare with the modules; a sentence says why an engine cannot.

    A few, because the first token meets an empty state, in which no decay shows.
    """
    if isinstance(engine, str):
        return engine
    vocabulary = engine.judge.config.vocab_size
    ids_bs = torch.arange(rows * _GATE).view(rows, _GATE) % vocabulary
    want_bw = engine.judge.prefill(ids_bs, num_last_tokens=1, impl="portable").logits[:, 0]
    try:
        logits_bw = [engine.step(ids_b) for ids_b in ids_bs.unbind(1)][-1]
    except BackendError as error:
        return reason_of(error)
    return _Started(engine, error_of([want_bw], [logits_bw]), _next_ids(engine, logits_bw))


def _next_ids(engine: _Engine, logits_bw: Tensor) -> Tensor:
    return logits_bw[:, : engine.judge.config.vocab_size].argmax(-1)


class _Turns(NamedTuple):
    """Of one engine: the seconds of every token, and the rate of memory around its turn."""

    seconds: list[float]
    rates: list[float]


@torch.inference_mode()
def _take_turns(
    started: dict[str, _Started | str], array: Tensor, tokens: int
) -> dict[str, _Turns]:
    ready = {who: start for who, start in started.items() if isinstance(start, _Started)}
    ids = {who: start.ids_b for who, start in ready.items()}
    turns = {who: _Turns([], []) for who in ready}
    before = read_rate(array)
    while any(len(turn.seconds) < tokens for turn in turns.values()):
        for who, (engine, _, _) in ready.items():
            seconds, rates = turns[who]
            # The first token of a turn brings the caches and the threads back, and is not timed.
            for place in range(-1, min(_TURN, tokens - len(seconds))):
                start = time.perf_counter()
                logits_bw = engine.step(ids[who])
                if place >= 0:
                    seconds.append(time.perf_counter() - start)
                ids[who] = _next_ids(engine, logits_bw)
            after = read_rate(array)
            rates += [(before + after) / 2] * (len(seconds) - len(rates))
            before = after
    return turns
