"""Decoding: one token after the other through whole models, against the rate of reading memory."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from anymamba.errors import BackendError
from anymamba.models import MambaConfig, MambaLM, preset, quantize_lm
from anymamba.nn import ModelCache

__all__ = [
    "FORMATS",
    "Decoding",
    "TokenLimit",
    "decode_figures",
    "stored_bytes",
    "token_limit",
]

_READ_BYTES = 128 * 2**20
FORMATS = ("float32", "bfloat16", "int8", "int4")
# The same numbers, another order of sums, and half types or activations that one side rounds.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "int8": 1e-3, "int4": 5e-2}


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
    """

    model: str
    format: str
    rows: int
    seconds: list[float]
    weight_bytes: int
    state_bytes: int
    error: float

    @property
    def ok(self) -> bool:
        """Whether the logits are those of the modules; else the time means nothing."""
        return self.error <= _TOLERANCE[self.format]

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
) -> list[Decoding]:
    """Measure decoding with random weights; nothing where the native decoder cannot run.

    Args:
        models: names of presets.
        formats: any of `FORMATS`.
        rows: how many sequences decode together.
        tokens: how many are timed, after a few that are not.
        configs: other models than the presets of these names.
        tell: is told what happens.
    """
    found = []
    for name in models:
        for form in formats:
            tell(f"decoding of {name}, {form}")
            lm = _model((configs or {}).get(name) or preset(name), form)
            for count in rows:
                try:
                    found.append(_measure(lm, name, form, count, tokens))
                except BackendError:
                    return found
    return found


def _model(config: MambaConfig, form: str) -> MambaLM:
    torch.manual_seed(0)
    lm = MambaLM(config, dtype=torch.bfloat16 if form == "bfloat16" else torch.float32)
    return quantize_lm(lm, form) if form.startswith("int") else lm


@torch.inference_mode()
def _measure(lm: MambaLM, name: str, form: str, rows: int, tokens: int) -> Decoding:
    cache = lm.empty_cache(rows)
    ids_b = torch.arange(rows) % lm.config.vocab_size
    want, _ = lm.step(ids_b, cache, impl="portable")
    seconds = []
    error = 0.0
    for place in range(-3, tokens):
        start = time.perf_counter()
        logits_bw = lm.step_(ids_b, cache, impl="native")
        taken = time.perf_counter() - start
        if place == -3:
            gap = (logits_bw.float() - want.float()).abs().max()
            error = float(gap / want.float().abs().max())
        if place >= 0:
            seconds.append(taken)
        ids_b = logits_bw[:, : lm.config.vocab_size].argmax(-1)
    return Decoding(name, form, rows, seconds, stored_bytes(lm), cache.nbytes, error)


def stored_bytes(lm: MambaLM) -> int:
    """Return the bytes of all weights that one token reads; of an untied embedding only a row.

    Example:
        >>> stored_bytes(MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=16))) > 8 * 16 * 4
        True
    """
    tensors = {}
    for name, tensor in lm.state_dict().items():
        is_table = name.startswith("backbone.embedding.") and not lm.config.tie_embeddings
        if not is_table:
            tensors[tensor.data_ptr()] = tensor.nbytes
    return sum(tensors.values())


class TokenLimit(NamedTuple):
    """How fast one sequence could decode if nothing but memory counted."""

    bytes_per_token: int
    bandwidth: float

    @property
    def tokens_per_second(self) -> float:
        """The limit."""
        return self.bandwidth / self.bytes_per_token

    def share(self, tokens_per_second: float) -> float:
        """Return a measured speed over the limit.

        Example:
            >>> TokenLimit(bytes_per_token=10, bandwidth=100.0).share(5.0)
            0.5
        """
        return tokens_per_second / self.tokens_per_second


def token_limit(lm: MambaLM, cache: ModelCache) -> TokenLimit:
    """Measure the rate of reading memory, and count what a token of one row moves.

    Args:
        lm: the model.
        cache: its state; one row.
    """
    array = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        array.sum()
        seconds.append(time.perf_counter() - start)
    return TokenLimit(stored_bytes(lm) + 2 * cache.nbytes, array.nbytes / min(seconds))
