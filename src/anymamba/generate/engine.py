"""Generation for a batch of prompts of any lengths, without padding.

Each prompt is read into its own state; then the rows decode together, one token per row and step,
and finished rows leave. A row does not depend on its neighbours.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Unpack

import torch

from anymamba.generate.batch import Batch, Options, Processor, Request, Row, Stop, request_of
from anymamba.generate.prompts import Progress, Prompts, check_model, check_prompts
from anymamba.models import MambaLM
from anymamba.nn import ModelCache, without_room

__all__ = ["GenerateOutput", "generate", "generate_detailed"]


class GenerateOutput(NamedTuple):
    """The new ids of every prompt, and what is known about them.

    Attributes:
        ids: new token ids per prompt; a stop id that ended a row is its last.
        logprobs: the log-probability of each new id under the model itself, before penalties,
            processors, temperature and filters; None unless asked for.
        cache: the state after the prompts and all new ids, one row per prompt.
        finish_reasons: "stop" or "length" per prompt.
    """

    ids: list[list[int]]
    logprobs: list[list[float]] | None
    cache: ModelCache
    finish_reasons: list[str]


def generate(
    lm: MambaLM,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    seed: int | Sequence[int] = 0,
    stop_ids: Iterable[int] = (),
    stop: Stop | Sequence[Stop] | None = None,
    processors: Processor | Sequence[Processor] = (),
    cache: ModelCache | None = None,
    prefill_chunk: int = 2048,
    progress: Progress | None = None,
) -> list[list[int]]:
    """Continue prompts of any lengths; return the new token ids of each.

    Row i draws numbers of its own, which `(seed, i)` and the place decide, so a row alone equals
    that row in a batch: `generate(lm, [prompts[i]], seed=row_seed(seed, i))`.

    Args:
        lm: the model.
        prompts: lists or 1-D tensors of token ids, or one tensor (batch, sequence).
        max_new_tokens: at most this many new ids per prompt.
        temperature: divisor of the logits; 0 takes the likeliest token.
        top_k: keep this many likeliest tokens; 0 means all.
        top_p: keep the likeliest tokens until their mass reaches this; 1 means all.
        min_p: keep tokens at least this likely, relative to the likeliest; 0 means all.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the
            prompt or in the new ids. What a given cache has read is not known here.
        frequency_penalty: subtracted for each time a token was generated.
        presence_penalty: subtracted once a token was generated.
        seed: one integer, or one per prompt.
        stop_ids: a row ends with the first of these; it is part of the result.
        stop: functions of a row's new ids; a row ends when one returns True. They must not change
            the list.
        processors: functions `(new_ids, logits_w) -> logits_w`, called for each row after the
            penalties and before temperature and filters.
        cache: state before the prompts, one row each; it is not changed.
        prefill_chunk: prompts are read in pieces of this many tokens.
        progress: called with the number of prompt tokens read and the number of all.

    Raises:
        ConfigError: an option is out of range, or a token id not in the vocabulary.
        ShapeError: no prompts, an empty one, or a processor that changes the shape.
        DtypeError: a prompt that is not made of token ids.
        CacheError: the cache does not have one row per prompt.
        NonFiniteError: no token can be chosen.

    Example:
        >>> from anymamba.models import MambaConfig
        >>> lm = MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=16))
        >>> [len(ids) for ids in generate(lm, [[1, 2, 3], [4]], max_new_tokens=5)]
        [5, 5]
    """
    request = request_of(
        "generate",
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        seed=seed,
        stop_ids=stop_ids,
        stop=stop,
        processors=processors,
        cache=cache,
        prefill_chunk=prefill_chunk,
        progress=progress,
    )
    rows, _ = _decode(lm, prompts, request, logprobs=False, with_cache=False)
    return [row.ids for row in rows]


def generate_detailed(
    lm: MambaLM,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    logprobs: bool = False,
    **options: Unpack[Options],
) -> GenerateOutput:
    """Continue prompts as `generate` does; return log-probabilities, state and reasons as well.

    The state has seen everything: hand it in with further tokens to go on, repeat its rows to fork,
    keep an older one to rewind.

    Args:
        lm: the model.
        prompts: as for `generate`.
        max_new_tokens: at most this many new ids per prompt.
        logprobs: whether to return the log-probability of each new id.
        **options: every other argument of `generate`.

    Example:
        >>> from anymamba.models import MambaConfig
        >>> lm = MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=16))
        >>> output = generate_detailed(lm, [[1, 2], [3]], max_new_tokens=4, logprobs=True)
        >>> output.cache.position, output.finish_reasons
        (tensor([6, 5]), ['length', 'length'])
    """
    request = request_of("generate_detailed", max_new_tokens, **options)
    rows, cache = _decode(lm, prompts, request, logprobs=logprobs, with_cache=True)
    assert cache is not None
    return GenerateOutput(
        [row.ids for row in rows],
        [row.logprobs for row in rows] if logprobs else None,
        # A copy made outside inference mode is an ordinary tensor again: gradients may pass it.
        without_room(cache),
        [request.finish_of(row) or "length" for row in rows],
    )


@torch.inference_mode()
def _decode(
    lm: MambaLM, prompts: Prompts, request: Request, *, logprobs: bool, with_cache: bool
) -> tuple[list[Row], ModelCache | None]:
    """Decode until every row is finished; return the rows in the prompts' order."""
    check_model(request.where, lm)
    batch = Batch(
        lm, check_prompts(request.where, prompts, lm.config.vocab_size), request, logprobs
    )
    if request.max_new_tokens == 0:
        return batch.rows, batch.cache
    rows = list(batch.rows)
    # Functions of the caller may change the model between two tokens; nobody else in this thread.
    is_ours_alone = not (request.stop or request.processors)
    with lm.unchanged() if is_ours_alone else nullcontext():
        left, caches = _run_to_the_end(batch, with_cache=with_cache)
    if not with_cache:
        return rows, None
    # Every row left before its last token was run: one step for all of them completes the state.
    back = sorted(range(len(left)), key=lambda place: left[place].place)
    before = ModelCache.join(caches).rows(back)
    newest_b = torch.tensor([row.ids[-1] for row in rows], device=before.position_b.device)
    return rows, lm.advance_state(newest_b, before)


def _run_to_the_end(batch: Batch, *, with_cache: bool) -> tuple[list[Row], list[ModelCache]]:
    """Return the rows in the order in which they left, and their states before the last token."""
    left: list[Row] = []
    caches: list[ModelCache] = []
    while True:
        batch.draw()
        batch.judge()
        is_going = [batch.finish_of(row) is None for row in batch.rows]
        going = [place for place, goes in enumerate(is_going) if goes]
        if len(going) < len(batch.rows):
            done = [place for place, goes in enumerate(is_going) if not goes]
            left += [batch.rows[place] for place in done]
            if with_cache:
                caches.append(batch.cache.rows(done) if going else batch.cache)
            if not going:
                return left, caches
            batch.keep(going)
        batch.feed()
