"""One prompt, token by token, as an iterator that knows its state."""

from collections.abc import Iterator, Sequence
from operator import length_hint
from typing import Unpack

import torch
from torch import Tensor

from anymamba.generate.batch import Batch, Options, Request, request_of
from anymamba.generate.prompts import check_model, check_prompts
from anymamba.models import MambaLM
from anymamba.nn import ModelCache, without_room

__all__ = ["Stream", "stream"]


class Stream(Iterator[int]):
    """The new token ids of one prompt; made by `stream`.

    A loop that breaks off can be taken up again with a second loop over the same object.
    """

    # No inference mode is entered for a token: that would take a tenth of the time between two, and
    # an interrupt on the way out would leave the caller in it. Whoever computes something turns
    # gradients off for itself: the model, and what the request does to logits. So the tensors are
    # ordinary ones, even if the caller is in inference mode now: it may have left it at the next.
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self,
        lm: MambaLM,
        prompt_ids: Sequence[int] | Tensor,
        request: Request,
        logprobs: bool = False,
    ) -> None:
        """Read the prompt."""
        check_model(request.where, lm)
        prompts = check_prompts(request.where, [prompt_ids], lm.config.vocab_size)
        self._batch = Batch(lm, prompts, request, logprobs=logprobs)
        self._row = self._batch.rows[0]
        self._start = self._position
        self._fed, self._is_feeding = 0, False
        # Never asked when it has nothing: an iterator that has ended stays so.
        self._to_yield = iter(self._row.ids)

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> int:
        has_token = self._has_token
        if not has_token and self._batch.finish_of(self._row) is not None:
            raise StopIteration
        try:
            if not has_token:
                self._feed()
                self._batch.draw()
            self._batch.judge()
        except StopIteration as error:
            raise RuntimeError("stream: a function of the caller's raised StopIteration") from error
        return next(self._to_yield)

    @property
    def _has_token(self) -> bool:
        """Whether a token was chosen and not yielded, because something failed after it."""
        return length_hint(self._to_yield) > 0

    @property
    def _yielded(self) -> int:
        return len(self._row.ids) - length_hint(self._to_yield)

    @property
    def ids(self) -> list[int]:
        """The tokens yielded so far."""
        return self._row.ids[: self._yielded]

    @property
    def logprobs(self) -> list[float] | None:
        """The log-probability of each token yielded so far, if they were asked for."""
        return self._row.logprobs[: self._yielded] if self._batch.with_logprobs else None

    @property
    def finish_reason(self) -> str | None:
        """Why there are no more tokens: "stop" or "length"; None while there are."""
        return None if self._has_token else self._batch.finish_of(self._row)

    @property
    def cache(self) -> ModelCache:
        """The state after the prompt and all tokens yielded so far: a copy of its own."""
        if not self._has_token:
            self._feed()
        return without_room(self._batch.cache)

    @property
    def _position(self) -> int:
        return int(self._batch.cache.position_b)

    def _feed(self) -> None:
        """Run the newest token through the model: put off until somebody needs it.

        Where it was interrupted or failed, the state itself knows whether that was done. Otherwise
        it is not asked: that takes a tenth of the time between two tokens.
        """
        newest = len(self._row.ids)
        if self._is_feeding and self._position == self._start + newest:
            self._batch.recover()
        elif self._fed < newest:
            self._is_feeding = True
            self._batch.feed()
        # In this order: an interrupt between the two must not let a token be fed twice.
        self._fed = newest
        self._is_feeding = False


def stream(
    lm: MambaLM,
    prompt_ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    logprobs: bool = False,
    **options: Unpack[Options],
) -> Stream:
    """Continue one prompt token by token; yields the ids that `generate` would return.

    Args:
        lm: the model.
        prompt_ids: a list or a 1-D tensor of token ids.
        max_new_tokens: at most this many new ids.
        logprobs: whether to find the log-probability of each token under the model itself, which
            takes a look at the whole vocabulary.
        **options: every other argument of `generate`; `seed` is one integer.

    Returns:
        An iterator of ids with `.cache`, `.logprobs`, `.ids` and `.finish_reason`.

    Example:
        >>> from anymamba.models import MambaConfig
        >>> lm = MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=16))
        >>> tokens = stream(lm, [1, 2, 3], max_new_tokens=4)
        >>> len([token for token in tokens]), tokens.cache.position
        (4, tensor([7]))
    """
    request = request_of("stream", max_new_tokens, **options)
    return Stream(lm, prompt_ids, request, logprobs)
