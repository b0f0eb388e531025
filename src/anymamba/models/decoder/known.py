"""The decoders of all models: compiled at the first token, again when the model has changed."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from anymamba.models.decoder.compiled import Decoder
from anymamba.models.decoder.repeat import Repeat
from anymamba.models.decoder.weights import NotServed, Weights

__all__ = ["decoder_of", "doubt_copies", "keep_for_repeats", "repeat_of", "unchanged"]

# Beside the models: a copy of a model, or a pickled one, must not carry addresses.
_decoders: weakref.WeakKeyDictionary[nn.Module, Decoder] = weakref.WeakKeyDictionary()
# Why a model is not served, so that not every token of its modules compiles it in vain.
_refusals: "weakref.WeakKeyDictionary[nn.Module, _Refusal]" = weakref.WeakKeyDictionary()


class _Refusal(NamedTuple):
    """Why a model is not served, how to ask whether that stands, and what else was looked at."""

    reason: str
    stands: Callable[[], bool] | None
    weights: Weights

    def is_current(self) -> bool:
        return self.stands is not None and self.stands() and self.weights.are_current()


class _Promise:
    """That a model does not change: how often it was given, and the decoder that was looked at."""

    def __init__(self) -> None:
        """Begin before it is given."""
        self.depth = 0
        self.decoder: Decoder | None = None
        self.memory: list[Tensor] = []
        self.repeat: Repeat | None = None

    def trust(self, decoder: Decoder) -> None:
        """Look at this decoder's weights no more."""
        self.decoder, self.repeat = decoder, None
        # A promise may be broken: what the kernel reads then is old, but still there.
        self.memory = decoder.weights.aliases()


class _Promises(threading.local):
    """The promises of one thread: what another does to a model, nobody here can know."""

    def __init__(self) -> None:
        """Begin without any."""
        self.given: weakref.WeakKeyDictionary[nn.Module, _Promise] = weakref.WeakKeyDictionary()


_promises = _Promises()


@contextmanager
def unchanged(lm: nn.Module) -> Iterator[None]:
    """Look at the weights at the first token inside, and not again; see `MambaLM.unchanged`.

    Args:
        lm: a `MambaLM`.
    """
    # Kept: whoever leaves the block may be another thread.
    given = _promises.given
    promise = given.setdefault(lm, _Promise())
    promise.depth += 1
    try:
        yield
    finally:
        promise.depth -= 1
        if promise.depth == 0:
            given.pop(lm, None)


def doubt_copies(lm: nn.Module) -> None:
    """Let the next token compare all that was copied with the parameters, bit by bit.

    Args:
        lm: a `MambaLM` of which many tokens may follow.
    """
    decoder = _decoders.get(lm)
    if decoder is not None:
        decoder.is_doubted = True


def keep_for_repeats(lm: nn.Module, repeat: Repeat) -> None:
    """Keep what a token was run with for the next one, as long as a promise is in force.

    Args:
        lm: a `MambaLM`.
        repeat: the token's call.
    """
    promise = _promises.given.get(lm)
    if promise is not None:
        promise.repeat = repeat


def repeat_of(lm: nn.Module) -> Repeat | None:
    """Return the call of the last token under this thread's promise, if there was one."""
    promise = _promises.given.get(lm)
    if promise is None or promise.repeat is None:
        return None
    # Another thread may have changed the model, and decoded with what it found.
    return promise.repeat if promise.repeat.decoder is _decoders.get(lm) else None


def decoder_of(lm: nn.Module) -> Decoder:
    """Return the decoder of the model as it is now.

    Raises:
        NotServed: there is none.
    """
    decoder, promise = _decoders.get(lm), _promises.given.get(lm)
    if decoder is not None and promise is not None and promise.decoder is decoder:
        return decoder
    if decoder is None or not decoder.is_current(closely=promise is not None):
        _decoders.pop(lm, None)
        decoder = _decoders[lm] = _compiled(lm)
    if promise is not None:
        promise.trust(decoder)
    return decoder


def _compiled(lm: nn.Module) -> Decoder:
    known = _refusals.get(lm)
    if known is not None and known.is_current():
        raise NotServed(known.reason)
    _refusals.pop(lm, None)
    weights = Weights()
    try:
        return Decoder(lm, weights)
    except NotServed as reason:
        _refusals[lm] = _Refusal(str(reason), reason.stands, weights)
        raise
