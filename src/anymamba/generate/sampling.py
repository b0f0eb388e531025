"""From logits to a token: penalties, filters and the draw, as pure functions.

Every function takes logits with the vocabulary on the last axis and treats rows independently. A
token that may not be drawn has the logit -inf. The order is the usual one:

    repetition, frequency and presence penalty      what was written already
    processors of the caller                        (the engine calls them, row by row)
    temperature, top-k, top-p, min-p                `restrict`
    draw                                            `Chooser.pick`

A filter sees what its forerunners left: top-p measures the mass that remains after top-k.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from operator import index
from typing import SupportsIndex, TypeGuard

import torch
from torch import Tensor

from anymamba.errors import ConfigError
from anymamba.ops import TokenChooser, check_option

__all__ = [
    "Chooser",
    "SamplingConfig",
    "draw",
    "is_integer",
    "keep_above",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "penalize_counts",
    "penalize_repetition",
    "restrict",
    "row_seed",
    "row_seeds",
    "uniform",
]

# Dividing by less only risks overflow: all mass lies on the largest logit long before.
GREEDY_BELOW = 1e-7
EVEN_ABOVE = 1e30  # and dividing by more makes no difference: all tokens are equally likely
# Of a nucleus. A flat vocabulary of 50,000 has some hundred tokens in a bin, a peaked one has few.
BINS, BINS_PER_UNIT = 2048, 64
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
        where = "SamplingConfig"
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ConfigError(f"{where}: {name} must be a number; got {value!r}.")
            if not math.isfinite(value):
                raise ConfigError(f"{where}: {name} must be finite; got {value}.")
        check_option(
            where, self.temperature >= 0, "temperature", "0 (greedy) or more", self.temperature
        )
        check_option(
            where,
            self.top_k >= 0 and int(self.top_k) == self.top_k,
            "top_k",
            "a whole number, 0 (all tokens) or more",
            self.top_k,
        )
        check_option(
            where, 0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (all tokens)", self.top_p
        )
        check_option(
            where, 0 <= self.min_p <= 1, "min_p", "between 0 (all tokens) and 1", self.min_p
        )
        check_option(
            where,
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

    A token goes if those before it already have the mass p. At least one stays; of equally likely
    tokens the first ones do.

    The vocabulary is not sorted, which takes milliseconds: its mass is added up in bins of equal
    width in logits, and only the bin in which p is reached is ranked.

    Example:
        >>> keep_top_p(torch.tensor([0.5, 0.25, 0.125, 0.125]).log(), 0.6).exp()
        tensor([0.5000, 0.2500, 0.0000, 0.0000])
    """
    if p >= 1:
        return logits
    logits_bw = logits.reshape(-1, logits.shape[-1])
    mass_bw = logits_bw.softmax(-1)
    below_bw = (logits_bw.amax(-1, keepdim=True) - logits_bw) * BINS_PER_UNIT
    # The last clamp is for NaN.
    bin_bw = below_bw.clamp_(max=BINS - 1).long().clamp_(min=0)
    mass_bn = mass_bw.new_zeros(len(mass_bw), BINS).scatter_add_(-1, bin_bw, mass_bw)
    reached_bn = mass_bn.cumsum(-1)
    crossed_b1 = (reached_bn < p).sum(-1, keepdim=True).clamp_(max=BINS - 1)
    before_b1 = (reached_bn - mass_bn).gather(-1, crossed_b1)
    is_out_bw = bin_bw > crossed_b1
    for row, is_inside_w in enumerate(bin_bw == crossed_b1):
        inside_m = is_inside_w.nonzero().squeeze(-1)
        ranked_m, order_m = mass_bw[row, inside_m].sort(descending=True, stable=True)
        is_beyond_m = ranked_m.cumsum(0) - ranked_m + before_b1[row] >= p
        is_beyond_m[:1] = False  # it is the first to reach p, however p is rounded
        is_out_bw[row, inside_m[order_m[is_beyond_m]]] = True
    return logits.masked_fill(is_out_bw.view_as(logits), -math.inf)


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
    # Others stay as they are, even if a penalty is infinite in this dtype.
    return torch.where(counts > 0, logits - frequency * counts - presence, logits)


def restrict(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Apply temperature, top-k, top-p and min-p, in this order; a greedy config changes nothing."""
    if config.is_greedy:
        return logits
    # Below zero nothing overflows but what has no mass.
    below = logits - logits.amax(-1, keepdim=True)
    logits = keep_top_k(below / min(config.temperature, EVEN_ABOVE), int(config.top_k))
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
    found = torch.searchsorted(reached_bw, uniform_b[:, None] * total_b1, right=True)
    # A number may be 1, by rounding to a narrower dtype: then the last token with mass is meant.
    last = torch.searchsorted(reached_bw, total_b1)
    return torch.minimum(found, last).squeeze(-1)


class Chooser:
    """Chooses a token per row: the likeliest, or a draw with the row's number.

    On the CPU a kernel does all of it: after a token has passed through a model nothing is left in
    the caches, and every call of torch costs tens of microseconds, whatever its size.

    Args:
        config: how to choose.
    """

    def __init__(self, config: SamplingConfig) -> None:
        """Write the options down."""
        self._config = config
        self._kernel = TokenChooser(
            is_greedy=config.is_greedy,
            temperature=min(max(config.temperature, GREEDY_BELOW), EVEN_ABOVE),
            top_k=int(config.top_k),
            top_p=config.top_p,
            min_p=config.min_p,
        )

    def pick(
        self, logits_bw: Tensor, uniform_b: Sequence[float], check: Callable[[list[float]], None]
    ) -> list[int]:
        """Choose.

        Args:
            logits_bw: after penalties and processors.
            uniform_b: from 0 to less than 1.
            check: is given the largest logit of each row, which choosing finds anyway. NaN counts
                as the largest.
        """
        chosen = self._kernel.choose(logits_bw, uniform_b)
        if chosen is not None:
            check(chosen.best)
            return chosen.ids
        best_b, ids_b = logits_bw.max(-1)
        check(best_b.tolist())
        if self._config.is_greedy:
            return ids_b.tolist()
        numbers_b = torch.tensor(uniform_b, dtype=torch.float64, device="cpu").to(logits_bw)
        return draw(restrict(logits_bw, self._config), numbers_b).tolist()


def is_integer(value: object) -> TypeGuard[SupportsIndex]:
    """Say whether this is a whole number and no truth value, which Python counts among them.

    Example:
        >>> is_integer(1), is_integer(True), is_integer(1.0)
        (True, False, False)
    """
    return isinstance(value, SupportsIndex) and not isinstance(value, bool | Tensor)


def row_seed(seed: int, row: int) -> int:
    """Return the seed under which row `row` of a batch draws; row 0 has the batch's own seed.

    So `generate(lm, prompts, seed=7)[3]` equals
    `generate(lm, [prompts[3]], seed=row_seed(7, 3))[0]`.

    Example:
        >>> row_seed(7, 0), row_seed(7, 3) == row_seed(7, 4)
        (7, False)
    """
    return seed if row == 0 else (seed + row * GOLDEN64) & MASK64


def row_seeds(where: str, seed: int | Sequence[int], rows: int) -> list[int]:
    """Return one seed per row, from one for all or from a list of one each.

    Raises:
        ConfigError: not integers, or not as many seeds as rows.
    """
    if is_integer(seed):
        return [row_seed(index(seed), row) for row in range(rows)]
    seeds = list(seed) if isinstance(seed, Sequence) else []
    if len(seeds) != rows or not all(map(is_integer, seeds)):
        raise ConfigError(
            f"{where}: seed must be one integer, or one for each of the {rows} prompts; "
            f"got {seed!r}."
        )
    return [index(one) for one in seeds]


def uniform(seed: int, place: int) -> float:
    """Return the number, from 0 to less than 1, that a row of this seed draws for a place.

    A function of both and nothing else: a token that was interrupted is drawn again with the same
    number, whatever device, dtype or generator torch has as its default.

    Example:
        >>> uniform(7, 0) == uniform(7, 0), uniform(7, 0) == uniform(7, 1)
        (True, False)
    """
    return (_scrambled(_scrambled(seed) + place) >> 11) * 2.0**-53


def _scrambled(number: int) -> int:
    """Mix the bits of a number (splitmix64), so that neighbours become unrelated."""
    z = (number + 1) * GOLDEN64 & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)
