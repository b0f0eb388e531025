"""From a stream of tokens to text on a terminal: whole characters, stop strings, speed."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anymamba.errors import ConfigError

if TYPE_CHECKING:
    from anymamba.io import Tokenizer
    from anymamba.models import MambaLM
    from anymamba.nn import ModelCache

__all__ = ["Speech", "StopText", "first_ids", "speak"]


class StopText:
    """Lets text pass until a stop string is complete; holds back what may become one.

    Example:
        >>> stop = StopText(["END"])
        >>> [stop.push(piece) for piece in ("a E", "N", "x", " END b")], stop.hit
        (['a ', '', 'ENx', ' '], 'END')
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Take the stop strings; none of them is empty."""
        self.stops = tuple(stops)
        if "" in self.stops:
            raise ConfigError("stop: a stop string must not be empty; got ''. Leave it out.")
        self.hit: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """Take text; return what is certainly not part of a stop string."""
        if self.hit is not None:
            return ""
        self._held += text
        found = [(place, stop) for stop in self.stops if (place := self._held.find(stop)) >= 0]
        if found:
            place, self.hit = min(found)
            shown, self._held = self._held[:place], ""
            return shown
        keep = max(map(self._overlap, self.stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """Return what was held back: no stop string came of it."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Return how many last characters are the beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


@dataclass(frozen=True, kw_only=True)
class Speech:
    """A finished continuation: what was said, why it ended, how fast it went."""

    text: str
    ids: list[int]
    finish_reason: str
    prompt_tokens: int
    prompt_seconds: float
    seconds: float
    cache: "ModelCache"

    @property
    def tokens_per_second(self) -> float | None:
        """Steps of the model over the time they took; None where there was none.

        The first token is chosen from what the prompt left: n tokens take n - 1 steps.
        """
        steps = len(self.ids) - 1
        return steps / max(self.seconds, 1e-9) if steps > 0 else None

    def facts(self) -> dict[str, Any]:
        """Return the plain values for a document."""
        return {
            "text": self.text,
            "ids": self.ids,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "prompt_seconds": self.prompt_seconds,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }

    def summary(self) -> str:
        """Return the figures in a line."""
        speed = self.tokens_per_second
        rate = "" if speed is None else f", {speed:.1f} tokens/s"
        return (
            f"{_tokens(len(self.ids))}{rate} "
            f"(prompt: {_tokens(self.prompt_tokens)} in {self.prompt_seconds:.2f} s; "
            f"ended by {self.finish_reason})"
        )


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def first_ids(tokenizer: "Tokenizer", text: str, *, is_opening: bool = True) -> list[int]:
    """Return the ids of a prompt; an empty one begins with the mark that separates texts."""
    ids = tokenizer.encode(text, add_special_tokens=is_opening)
    if ids:
        return ids
    mark = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    if mark is None:
        raise ConfigError(
            "prompt: the prompt must not be empty, because the tokenizer has no mark to begin with."
        )
    return [mark]


def speak(
    lm: "MambaLM",
    tokenizer: "Tokenizer",
    prompt_ids: list[int],
    write: Callable[[str], object],
    *,
    stops: Iterable[str] = (),
    cache: "ModelCache | None" = None,
    **options: Any,
) -> Speech:
    """Continue a prompt, writing text as soon as it is certain.

    The state that comes back ends where the text ends: tokens of a stop string are taken back by
    reading the turn again without them. Ctrl-C ends the text, not the program.

    Args:
        lm: the model.
        tokenizer: that belongs to it.
        prompt_ids: tokens to begin with.
        write: called with each piece of text.
        stops: strings that end the text; they are not written.
        cache: state before the prompt.
        **options: of `anymamba.generate.stream`.
    """
    from anymamba.generate import stream
    from anymamba.io import IncrementalDecoder

    eos = tokenizer.eos_id
    stop_ids = [] if eos is None or eos >= lm.config.vocab_size else [eos]
    start = time.perf_counter()
    tokens = stream(lm, prompt_ids, stop_ids=stop_ids, cache=cache, **options)
    middle = time.perf_counter()
    decoder, stop = IncrementalDecoder(tokenizer), StopText(stops)
    said: list[str] = []

    def say(text: str) -> None:
        if text:
            said.append(text)
            write(text)

    is_interrupted = False
    try:
        with lm.unchanged():
            for token in tokens:
                say(stop.push(decoder.push(token)))
                if stop.hit is not None:
                    break
    except KeyboardInterrupt:
        is_interrupted = True
    end = time.perf_counter()
    if stop.hit is None:
        say(stop.push(decoder.flush()) + ("" if stop.hit else stop.flush()))
    text, ids = "".join(said), list(tokens.ids)
    if stop.hit is None:
        after = tokens.cache
    else:
        kept = _ids_within(tokenizer, ids, len(text))
        after = stream(lm, prompt_ids + kept, max_new_tokens=0, cache=cache).cache
    reason = tokens.finish_reason or "interrupt"
    return Speech(
        text=text,
        ids=ids,
        finish_reason="interrupt" if is_interrupted else "stop" if stop.hit else reason,
        prompt_tokens=len(prompt_ids),
        prompt_seconds=middle - start,
        seconds=end - middle,
        cache=after,
    )


def _ids_within(tokenizer: "Tokenizer", ids: list[int], length: int) -> list[int]:
    """Return the first ids, as many as fit into `length` characters of text."""
    count = len(ids)
    while count and len(tokenizer.decode(ids[:count])) > length:
        count -= 1
    return ids[:count]
