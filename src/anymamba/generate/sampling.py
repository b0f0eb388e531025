"""From logits to a token: penalties, filters and the draw, as pure functions.

Every function takes logits with the vocabulary on the last axis and treats rows independently. A
token that may not be drawn has the logit -inf. The order is the usual one:

    repetition, frequency and presence penalty      what was written already
    processors of the caller                        (the engine calls them, row by row)
    temperature, top-k, top-p, min-p                `restrict`
    draw                                            `pick`

A filter sees what its forerunners left: top-p measures the mass that remains after top-k.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeGuard

import torch
from torch import Tensor

from anymamba.errors import ConfigError

__all__ = [
    "SamplingConfig",
    "draw",
    "is_integer",
    "keep_above",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "penalize_counts",
    "penalize_repetition",
    "pick",
    "restrict",
    "row_generators",
    "row_seed",
]

# Dividing by less only risks overflow: all mass lies on the largest logit long before.
GREEDY_BELOW = 1e-7
# Sorting a whole vocabulary takes milliseconds; the nucleus mostly lies within the first tokens.
NUCLEUS_GUESSES = (64, 1024)
MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How a token is chosen from logits; the defaults choose the likeliest one.

    Args:
        temperature: divisor of the logits; below 1e-7 the likeliest token is taken.
        top_k: keep this many likeliest tokens, and those that tie with the last; 0 means all.
        top_p: keep the likeliest tokens until their mass reaches this; 1 means all.
        min_p: keep tokens at least this likely, relative to the likeliest; 0 means all.
        repetition_penalty: positive logits of tokens seen, prompt included, are divided by this,
            negative ones multiplied; 1 means none.
        frequency_penalty: subtracted from a logit for each time the token was generated.
        presence_penalty: subtracted from a logit once the token was generated.

    Example:
        >>> SamplingConfig(temperature=0.8, top_p=0.95).is_greedy
        False
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def __post_init__(self) -> None:
        """Check every option's range."""
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"SamplingConfig: {name} must be a number; got {value!r}.")
            if not math.isfinite(value):
                raise ConfigError(f"SamplingConfig: {name} must be finite; got {value}.")
        _demand(self.temperature >= 0, "temperature", "0 (greedy) or more", self.temperature)
        _demand(
            self.top_k >= 0 and int(self.top_k) == self.top_k,
            "top_k",
            "a whole number, 0 (all tokens) or more",
            self.top_k,
        )
        _demand(0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (all tokens)", self.top_p)
        _demand(0 <= self.min_p <= 1, "min_p", "between 0 (all tokens) and 1", self.min_p)
        _demand(
            self.repetition_penalty > 0,
            "repetition_penalty",
            "positive; 1 means none",
            self.repetition_penalty,
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken and no random number drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty depends on how often a token was generated."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0


def _demand(holds: bool, name: str, what: str, given: float) -> None:
    if not holds:
        raise ConfigError(f"SamplingConfig: {name} must be {what}; got {given}.")


def keep_above(logits: Tensor, threshold: Tensor | float) -> Tensor:
    """Remove the tokens whose logit lies below the threshold.

    Example:
        >>> keep_above(torch.tensor([1.0, 2.0, 3.0]), 2.0)
        tensor([-inf, 2., 3.])
    """
    return logits.masked_fill(logits < threshold, -math.inf)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k largest logits, and those equal to the last of them; 0 keeps all."""
    if k == 0 or k >= logits.shape[-1]:
        return logits
    return keep_above(logits, logits.topk(k).values[..., -1:])


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the likeliest tokens until their mass reaches p; the one that crosses p stays.

    A token goes if the tokens before it already have the mass p. At least one stays.

    Example:
        >>> keep_top_p(torch.tensor([0.5, 0.25, 0.125, 0.125]).log(), 0.6).exp()
        tensor([0.5000, 0.2500, 0.0000, 0.0000])
    """
    if p >= 1:
        return logits
    vocabulary = logits.shape[-1]
    mass = logits.softmax(-1)
    few, many = NUCLEUS_GUESSES
    for count in (few, many, vocabulary):
        values, index = logits.topk(min(count, vocabulary))
        ranked = mass.gather(-1, index)
        reached = ranked.cumsum(-1)
        if count >= vocabulary or bool((reached[..., -1] >= p).all()):
            break
    values = values.masked_fill(reached - ranked >= p, -math.inf)
    return torch.full_like(logits, -math.inf).scatter(-1, index, values)


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Keep tokens whose probability is at least `min_p` times the largest one.

    Official code compares logits with `min_p` times a logit, which depends on an arbitrary shift;
    a ratio of probabilities is a difference of logits.
    """
    if min_p == 0:
        return logits
    return keep_above(logits, logits.amax(-1, keepdim=True) + math.log(min_p))


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the positive logits of seen tokens by the penalty, and multiply the negative ones.

    Args:
        logits: (..., vocabulary).
        seen: which tokens occurred; boolean, shaped like `logits`.
        penalty: positive; above 1 discourages.
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def penalize_counts(logits: Tensor, counts: Tensor, frequency: float, presence: float) -> Tensor:
    """Subtract `frequency` per occurrence, and `presence` once, from tokens that occurred.

    Args:
        logits: (..., vocabulary).
        counts: how often each token occurred; shaped like `logits`.
        frequency: per occurrence.
        presence: for any occurrence.
    """
    return logits - frequency * counts - presence * (counts > 0).to(logits.dtype)


def restrict(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Apply temperature, top-k, top-p and min-p, in this order; a greedy config changes nothing."""
    if config.is_greedy:
        return logits
    return _cut_off(keep_top_k(logits / config.temperature, int(config.top_k)), config)


def _cut_off(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Apply what comes after top-k."""
    return keep_min_p(keep_top_p(logits, config.top_p), config.min_p)


def draw(logits_bw: Tensor, uniform_b: Tensor) -> Tensor:
    """Draw one token per row by inverting the distribution function.

    The token is the first whose cumulative mass exceeds the row's number, so it depends on this
    row and this number only, and a token without mass is never drawn.

    Args:
        logits_bw: at least one finite logit per row.
        uniform_b: numbers from 0 to 1, in the logits' dtype.
    """
    reached_bw = logits_bw.softmax(-1).cumsum(-1)
    total_b1 = reached_bw[:, -1:].contiguous()
    index = torch.searchsorted(reached_bw, uniform_b[:, None] * total_b1, right=True)
    # A number may be 1, by rounding to a narrower dtype: then the last token with mass is meant.
    last = torch.searchsorted(reached_bw, total_b1)
    return torch.minimum(index, last).squeeze(-1)


def pick(
    logits_bw: Tensor,
    config: SamplingConfig,
    generators: Sequence[torch.Generator],
    check: Callable[[list[float]], None],
) -> Tensor:
    """Choose a token per row: the likeliest, or a draw with one number of the row's generator.

    Args:
        logits_bw: after penalties and processors.
        config: how to choose.
        generators: one per row, on the CPU, so that every device draws the same numbers.
        check: is given the largest logit of each row, which choosing finds anyway, before a number
            is drawn. NaN counts as the largest.
    """
    if config.is_greedy:
        ids_b = logits_bw.argmax(-1)
        check(logits_bw.gather(-1, ids_b[:, None]).flatten().tolist())
        return ids_b
    k, vocabulary = int(config.top_k), logits_bw.shape[-1]
    if 0 < k < vocabulary:
        values_bw, places_bw = logits_bw.topk(k + 1)
        ranked = values_bw.tolist()
        check([row[0] for row in ranked])
        # What equals the last of them is kept too, wherever it is.
        if all(row[k - 1] > row[k] for row in ranked):
            # A handful of candidates: no softmax over the vocabulary is made.
            kept = places_bw[:, :k].sort(-1).values
            few_bw = _cut_off(logits_bw.gather(-1, kept) / config.temperature, config)
            return kept.gather(-1, draw(few_bw, _uniform(few_bw, generators))[:, None]).squeeze(-1)
    else:
        check(logits_bw.amax(-1).tolist())
    return draw(restrict(logits_bw, config), _uniform(logits_bw, generators))


def _uniform(logits_bw: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Return a number of each row's own, in the dtype and on the device of the logits."""
    return torch.cat([torch.rand(1, generator=one) for one in generators]).to(logits_bw)


def is_integer(value: object) -> TypeGuard[int]:
    """Say whether this is a whole number and no truth value, which Python counts among them.

    Example:
        >>> is_integer(1), is_integer(True)
        (True, False)
    """
    return isinstance(value, int) and not isinstance(value, bool)


def row_seed(seed: int, row: int) -> int:
    """Return the seed under which row `row` of a batch draws; row 0 has the batch's own seed.

    So `generate(lm, prompts, seed=7)[3]` equals
    `generate(lm, [prompts[3]], seed=row_seed(7, 3))[0]`.

    Example:
        >>> row_seed(7, 0), row_seed(7, 3) == row_seed(7, 4)
        (7, False)
    """
    return seed if row == 0 else (seed + row * GOLDEN64) & MASK64


def row_generators(where: str, seed: int | Sequence[int], rows: int) -> list[torch.Generator]:
    """Return one generator per row, from one seed for all or from a list of one seed each.

    Raises:
        ConfigError: not integers, or not as many seeds as rows.
    """
    if is_integer(seed):
        seeds = [row_seed(seed, row) for row in range(rows)]
    else:
        seeds = list(seed) if isinstance(seed, Sequence) else []
        if len(seeds) != rows or not all(map(is_integer, seeds)):
            raise ConfigError(
                f"{where}: seed must be one integer, or one for each of the {rows} prompts; "
                f"got {seed!r}."
            )
    return [torch.Generator().manual_seed(_scrambled(s)) for s in seeds]


def _scrambled(seed: int) -> int:
    """Mix the bits of a seed (splitmix64), so that neighbouring seeds give unrelated streams.

    torch's CPU generator looks at the low 32 bits only; mixing lets all 64 count.
    """
    z = (seed + GOLDEN64) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return (z ^ (z >> 31)) >> 32
