"""Rows that decode together: what was asked for, and the state of the work."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from operator import index
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from anymamba.errors import ConfigError, NonFiniteError, ShapeError
from anymamba.generate.prompts import Progress, read_prompts
from anymamba.generate.sampling import (
    Chooser,
    SamplingConfig,
    is_integer,
    penalize_counts,
    penalize_repetition,
    row_seeds,
    uniform,
)
from anymamba.models import MambaLM
from anymamba.nn import ModelCache, nearest
from anymamba.ops import without_gradients

__all__ = ["Batch", "Options", "Processor", "Request", "Row", "Stop", "request_of"]

Stop = Callable[[list[int]], bool]
Processor = Callable[[list[int], Tensor], Tensor]


class Options(TypedDict, total=False):
    """The optional arguments of `generate`, where they are described."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int | Sequence[int]
    stop_ids: Iterable[int]
    stop: Stop | Sequence[Stop] | None
    processors: Processor | Sequence[Processor]
    cache: ModelCache | None
    prefill_chunk: int
    progress: Progress | None


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for, checked."""

    where: str
    max_new_tokens: int
    sampling: SamplingConfig
    seed: int | Sequence[int] = 0
    stop_ids: Iterable[int] = ()
    stop: Sequence[Stop] = ()
    processors: Sequence[Processor] = ()
    cache: ModelCache | None = None
    prefill_chunk: int = 2048
    progress: Progress | None = None

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name, least in (("max_new_tokens", 0), ("prefill_chunk", 1)):
            value = getattr(self, name)
            if not is_integer(value) or index(value) < least:
                raise ConfigError(
                    f"{self.where}: {name} must be an integer of at least {least}; got {value!r}."
                )

    def finish_of(self, row: "Row") -> str | None:
        """Say why a row is finished, or None."""
        if row.is_stopped or (row.ids and row.ids[-1] in self.stop_ids):
            return "stop"
        return "length" if len(row.ids) >= self.max_new_tokens else None


def request_of(where: str, max_new_tokens: int, **options: Unpack[Options]) -> Request:
    """Sort the options into those of sampling and the rest, and check both."""
    known = Options.__annotations__.keys()
    for name in options.keys() - known:
        raise TypeError(f"{where}: unexpected argument {name!r}.{nearest(name, known)}")
    names = {field.name for field in fields(SamplingConfig)}
    sampling = SamplingConfig(**{n: v for n, v in options.items() if n in names})  # pyright: ignore[reportArgumentType]
    rest = {name: value for name, value in options.items() if name not in names}
    rest["stop_ids"] = _stop_ids(where, rest.get("stop_ids", ()))
    for name in ("stop", "processors"):
        rest[name] = _functions(where, name, rest.get(name))
    return Request(where=where, max_new_tokens=max_new_tokens, sampling=sampling, **rest)  # pyright: ignore[reportArgumentType]


def _stop_ids(where: str, given: object) -> frozenset[int]:
    # A list is made once: an iterator would be empty at the second look.
    found: list[Any] | None = list(given) if isinstance(given, Iterable) else None
    if found is None or not all(map(is_integer, found)):
        raise ConfigError(
            f"{where}: stop_ids must be a list of token ids; got {given!r}. For stop strings pass "
            "stop=, a function of the new ids."
        )
    return frozenset(map(index, found))


def _functions(where: str, name: str, given: object) -> tuple[Callable[..., Any], ...]:
    """Return none, one or several functions as a tuple."""
    if given is None:
        return ()
    functions: tuple[Any, ...] = (given,)
    if isinstance(given, Iterable) and not callable(given):
        functions = tuple(given)
    if not all(callable(function) for function in functions):
        raise ConfigError(
            f"{where}: {name} must be a function or a list of functions; got {given!r}."
        )
    return functions


@dataclass
class Row:
    """One prompt's continuation.

    The ids are what is certain. All else follows from them or is overwritten together with the next
    one, so that work which was interrupted anywhere can be done again.

    Attributes:
        place: of the prompt.
        seed: of the row's numbers.
        ids: chosen so far.
        logprobs: of those ids, if they are wanted.
        is_stopped: a function of the caller's has said so.
        judged: how many ids those functions have seen.
        counted: how often a token is among the ids, and how many ids there were when it was
            counted; filled where a penalty asks.
    """

    place: int
    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_stopped: bool = False
    judged: int = 0
    counted: dict[int, tuple[int, int]] = field(default_factory=dict)

    def count_newest(self) -> int:
        """Return how often the newest token is among the ids; twice is as good as once.

        The ids are not searched: a late token costs what an early one did. Each must be counted
        before the next one comes.
        """
        token, length = self.ids[-1], len(self.ids)
        times, counted_at = self.counted.get(token, (0, 0))
        if counted_at < length:
            times += 1
            # Both in one write: an interrupt comes before it or after it.
            self.counted[token] = times, length
        return times


class Batch:
    """The unfinished rows, their state, and the logits for their next tokens."""

    def __init__(
        self, lm: MambaLM, prompts: list[list[int]], request: Request, logprobs: bool
    ) -> None:
        """Read the prompts."""
        self.lm, self.request, self.with_logprobs = lm, request, logprobs
        seeds = row_seeds(request.where, request.seed, len(prompts))
        self.rows = [Row(place, seed) for place, seed in enumerate(seeds)]
        logits_bw, self.cache = read_prompts(
            request.where, lm, prompts, request.cache, request.prefill_chunk, request.progress
        )
        self.logits_bw = self._real(logits_bw)
        self._width, self._landing_bw = logits_bw.shape[1], None
        self._landing: tuple[Tensor, Tensor] | None = None
        self._newest: tuple[array[int], Tensor] | None = None
        self._device = logits_bw.device
        self.chooser = Chooser(request.sampling)
        self.seen_bw = self.counts_bw = None
        if request.sampling.repetition_penalty != 1:
            self.seen_bw = torch.zeros_like(self.logits_bw, dtype=torch.bool)
            for row, prompt in enumerate(prompts):
                self.seen_bw[row, sorted(set(prompt))] = True
        if request.sampling.counts_tokens:
            self.counts_bw = torch.zeros_like(self.logits_bw)
        has_penalties = self.seen_bw is not None or self.counts_bw is not None
        self._has_changes = has_penalties or bool(request.processors)

    def finish_of(self, row: Row) -> str | None:
        """Say why a row is finished, or None."""
        return self.request.finish_of(row)

    def draw(self) -> None:
        """Choose the next token of every row and append it.

        Nothing else changes: until the id is there, the same token would be chosen again.
        """
        logits_bw = self._changed() if self._has_changes else self.logits_bw
        if self.request.sampling.is_greedy:
            numbers = [0.0] * len(self.rows)
        else:
            numbers = [uniform(row.seed, len(row.ids)) for row in self.rows]
        ids = self.chooser.pick(logits_bw, numbers, self._check)
        if self.with_logprobs:
            ids_b1 = torch.tensor(ids, device=self.logits_bw.device)[:, None]
            chosen_b1 = self.logits_bw.log_softmax(-1).gather(-1, ids_b1)
            for row, value in zip(self.rows, chosen_b1.flatten().tolist(), strict=True):
                row.logprobs[len(row.ids) :] = [value]
        for row, token in zip(self.rows, ids, strict=True):
            row.ids.append(token)

    def judge(self) -> None:
        """Ask the caller's functions which rows are finished; those that failed are asked again."""
        for row in self.rows:
            if row.judged == len(row.ids):
                continue
            if self.request.stop and row.ids[-1] not in self.request.stop_ids:
                row.is_stopped = self._stops(row)
            row.judged = len(row.ids)

    @without_gradients
    def _stops(self, row: Row) -> bool:
        return any(stop(row.ids) for stop in self.request.stop)

    @without_gradients
    def _changed(self) -> Tensor:
        """Return the logits after what the request does to them."""
        self._remember()
        return self._processed(self._penalized(self.logits_bw))

    def _remember(self) -> None:
        """Write down the newest ids for the penalties; twice is as good as once."""
        for place, row in enumerate(self.rows):
            if not row.ids:
                continue
            if self.seen_bw is not None:
                self.seen_bw[place, row.ids[-1]] = True
            if self.counts_bw is not None:
                self.counts_bw[place, row.ids[-1]] = row.count_newest()

    def feed(self) -> None:
        """Run the newest token of every row through the model."""
        ids_b = self._newest_ids()
        # Known beforehand: an interrupt may come when the state has moved and nothing is returned.
        self._landing_bw, real_bw = self._landing_of(len(self.rows))
        logits_bw, cache = self.lm.advance(ids_b, self.cache, landing_bw=self._landing_bw)
        self.logits_bw = real_bw if logits_bw is self._landing_bw else self._real(logits_bw)
        # The state comes last: where modules made a new one, nothing was landed, and an interrupt
        # up to here lets the token be fed again.
        self._landing_bw = None
        self.cache = cache

    def _newest_ids(self) -> Tensor:
        """Return the newest id of every row.

        On the CPU in the same memory for every token: to make a tensor takes a fifth of the time
        that is spent between two tokens, after the model has left nothing in the caches.
        """
        newest = [row.ids[-1] for row in self.rows]
        if self._device.type != "cpu":
            return torch.tensor(newest, device=self._device)
        if self._newest is None or len(self._newest[0]) != len(newest):
            numbers = array("q", newest)
            self._newest = numbers, torch.frombuffer(numbers, dtype=torch.int64)
        numbers, ids_b = self._newest
        for place, token in enumerate(newest):
            numbers[place] = token
        return ids_b

    def _landing_of(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return a place for logits, and its part without padding; the same for every token.

        To make both takes longer than to choose a token, and the logits before a token are not
        needed any more when it is fed.
        """
        if self._landing is None or len(self._landing[0]) != rows:
            landing_bw = torch.empty(rows, self._width, dtype=torch.float32, device="cpu")
            self._landing = landing_bw, self._real(landing_bw)
        return self._landing

    def recover(self) -> None:
        """Take the logits of a token that was interrupted after the decoder had moved the state."""
        if self._landing_bw is not None:
            self.logits_bw = self._real(self._landing_bw)
            self._landing_bw = None

    def keep(self, places: list[int]) -> None:
        """Go on with the rows at these places only."""
        self.rows = [self.rows[place] for place in places]
        self.cache = self.cache.rows(places)
        self.logits_bw = self.logits_bw[places]
        self.seen_bw = None if self.seen_bw is None else self.seen_bw[places]
        self.counts_bw = None if self.counts_bw is None else self.counts_bw[places]

    def _real(self, logits_bw: Tensor) -> Tensor:
        """Cut off the padding of the vocabulary, so that nothing can choose from it."""
        logits_bw = logits_bw[:, : self.lm.config.vocab_size]
        is_whole = logits_bw.dtype in (torch.float32, torch.float64)
        return logits_bw if is_whole else logits_bw.float()

    def _penalized(self, logits_bw: Tensor) -> Tensor:
        sampling = self.request.sampling
        if self.seen_bw is not None:
            logits_bw = penalize_repetition(logits_bw, self.seen_bw, sampling.repetition_penalty)
        if self.counts_bw is not None:
            logits_bw = penalize_counts(
                logits_bw, self.counts_bw, sampling.frequency_penalty, sampling.presence_penalty
            )
        return logits_bw

    def _processed(self, logits_bw: Tensor) -> Tensor:
        if not self.request.processors:
            return logits_bw
        rows = []
        for row, logits_w in zip(self.rows, logits_bw, strict=True):
            # A copy: a processor may write into it, and log-probabilities need the original.
            changed_w = logits_w.clone()
            for processor in self.request.processors:
                changed_w = processor(row.ids, changed_w)
                if not isinstance(changed_w, Tensor) or changed_w.shape != logits_w.shape:
                    raise ShapeError(
                        f"{self.request.where}: a processor must return logits of shape "
                        f"{tuple(logits_w.shape)}; got {_shape_of(changed_w)}."
                    )
            rows.append(changed_w.to(logits_w.dtype))
        return torch.stack(rows)

    def _check(self, best: list[float]) -> None:
        """Refuse rows from which no token can be chosen, by the largest logit of each."""
        bad = [row.place for row, value in zip(self.rows, best, strict=True) if not isfinite(value)]
        if not bad:
            return
        raise NonFiniteError(
            f"{self.request.where}: the largest logit of each row must be finite; it is not in "
            f"row {bad[0]}. Either a penalty or a processor left no token, or the model computes "
            "NaN: check its weights and dtype."
        )


def _shape_of(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
