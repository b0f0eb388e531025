"""One token through the decoder, or the reason why modules must run it."""

import logging
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from anymamba import settings
from anymamba.errors import BackendError, ShapeError
from anymamba.models.decoder.compiled import Bound, Decoder
from anymamba.models.decoder.known import decoder_of, keep_for_repeats, repeat_of
from anymamba.models.decoder.repeat import Repeat
from anymamba.models.decoder.weights import NotServed
from anymamba.models.inputs import check_known, check_rows
from anymamba.nn import ModelCache
from anymamba.ops import native_status

__all__ = [
    "is_served",
    "native_refusal",
    "native_state",
    "native_step",
    "repeated_state",
    "repeated_step",
]

_log = logging.getLogger("anymamba.models")
_log.addHandler(logging.NullHandler())
_told: "weakref.WeakKeyDictionary[nn.Module, set[str]]" = weakref.WeakKeyDictionary()


def native_refusal(lm: nn.Module, ids_b: Tensor, cache: ModelCache | None = None) -> str | None:
    """Say why the decoder cannot run this token; None when it can. Nothing is changed.

    Args:
        lm: a `MambaLM`.
        ids_b: one id per row.
        cache: of this model; not looked at when omitted.

    Raises:
        ConfigError: the embedding has no such id.
        CacheError: the state is not one of this model's, or has other rows than there are ids.
    """
    try:
        if cache is None:
            _decoder_for(lm, ids_b)
        else:
            backbone: Any = lm.backbone
            backbone.check_cache("native_refusal", cache, is_needed=True)
            check_rows("native_refusal", ids_b, cache.position_b.shape[0])
            _prepare(lm, ids_b, cache)
    except NotServed as reason:
        return str(reason)
    return None


def is_served(lm: nn.Module, ids_b: Tensor) -> bool:
    """Say whether the decoder can run this token on some cache; logs the reason once if not.

    Args:
        lm: a `MambaLM`.
        ids_b: one id per row.
    """
    reason = native_refusal(lm, ids_b)
    if reason is not None:
        _tell_modules(lm, reason)
    return reason is None


def native_step(
    lm: nn.Module, ids_b: Tensor, cache: ModelCache, impl: str, landing_bw: Tensor | None = None
) -> tuple[Tensor, ModelCache] | None:
    """Run one token in the cache's own memory, or in a larger copy where attention has no room.

    Everything is checked before the kernel starts, and the kernel runs to its end: the state is
    that before the token or that after it.

    Args:
        lm: a `MambaLM`.
        ids_b: one id per row.
        cache: of this model, with as many rows; advanced in place, or left alone if it is full.
        impl: "auto" returns None where the decoder cannot serve, and logs the reason once; "native"
            raises it.
        landing_bw: where the kernel writes the logits, in float32; a new tensor of the model's
            dtype by default.

    Returns:
        The logits (batch, padded vocabulary) and the cache after the token, or None.

    Raises:
        BackendError: with impl="native", the reason.
        ConfigError: the embedding has no such id.
        CacheError: a state of another family or shape.
        ShapeError: `landing_bw` does not fit.
    """
    ready = _ready(lm, ids_b, cache, impl)
    if ready is None:
        return None
    decoder, bound = ready
    return _run(decoder, bound, ids_b.tolist(), landing_bw), bound.cache


def native_state(lm: nn.Module, ids_b: Tensor, cache: ModelCache, impl: str) -> ModelCache | None:
    """Run one token as `native_step` does, without the head; return the state after it.

    Raises:
        BackendError: with impl="native", the reason.
        ConfigError: the embedding has no such id.
        CacheError: a state of another family or shape.
    """
    ready = _ready(lm, ids_b, cache, impl)
    if ready is None:
        return None
    _, bound = ready
    bound.run(ids_b.tolist(), None)
    return bound.cache


def repeated_step(
    lm: nn.Module, ids_b: Tensor, cache: ModelCache, landing_bw: Tensor | None = None
) -> Tensor | None:
    """Run one token as the last one was run, if all is as it was then; else do nothing.

    Args:
        lm: a `MambaLM` that is promised not to change; there is nothing to repeat otherwise.
        ids_b: one id per row; not checked yet.
        cache: the state; not checked yet.
        landing_bw: as for `native_step`.

    Returns:
        The logits, or None: then the token has to be checked and run like a first one.
    """
    repeat = repeat_of(lm)
    if repeat is None or (ids := repeat.ids_of(ids_b, cache)) is None:
        return None
    return _run(repeat.decoder, repeat.bound, ids, landing_bw)


def repeated_state(lm: nn.Module, ids_b: Tensor, cache: ModelCache) -> bool:
    """Run one token as `repeated_step` does, without the head; say whether it was run."""
    repeat = repeat_of(lm)
    if repeat is None or (ids := repeat.ids_of(ids_b, cache)) is None:
        return False
    repeat.bound.run(ids, None)
    return True


def _run(decoder: Decoder, bound: Bound, ids: list[int], landing_bw: Tensor | None) -> Tensor:
    shape = (bound.binding.rows, decoder.head_rows)
    if landing_bw is None:
        logits_bw = torch.empty(shape, dtype=decoder.dtype, device="cpu")
    else:
        logits_bw = _checked_landing(landing_bw, shape)
    bound.run(ids, logits_bw)
    return logits_bw


def _ready(
    lm: nn.Module, ids_b: Tensor, cache: ModelCache, impl: str
) -> "tuple[Decoder, Bound] | None":
    """Return what runs the token; None where modules must, unless `impl` insists."""
    try:
        found = _prepare(lm, ids_b, cache)
    except NotServed as reason:
        if impl == "native":
            raise BackendError(
                f"MambaLM: impl='native' cannot serve this token: {reason}. "
                "Use impl='auto' or impl='portable'."
            ) from None
        _tell_modules(lm, reason)
        return None
    _tell(lm, "native decoder")
    if (repeat := Repeat.of(*found)) is not None:
        keep_for_repeats(lm, repeat)
    return found


def _checked_landing(given_bw: Tensor, shape: tuple[int, int]) -> Tensor:
    fits = given_bw.shape == shape and given_bw.dtype is torch.float32
    if not fits or not given_bw.is_contiguous() or not given_bw.is_cpu:
        raise ShapeError(
            f"MambaLM.advance: landing_bw must be contiguous float32 of shape {shape} on the CPU; "
            f"got {given_bw.dtype} of shape {tuple(given_bw.shape)} on {given_bw.device}."
        )
    return given_bw


def _prepare(lm: nn.Module, ids_b: Tensor, cache: ModelCache) -> tuple[Decoder, Bound]:
    decoder = _decoder_for(lm, ids_b)
    check_known("MambaLM", ids_b, decoder.vocabulary)
    return decoder, decoder.bound(cache)


def _decoder_for(lm: nn.Module, ids_b: Tensor) -> Decoder:
    _check_call(ids_b)
    return decoder_of(lm)


def _check_call(ids_b: Tensor) -> None:
    if (why_not := native_status().why_not) is not None:
        raise NotServed(why_not)
    if type(ids_b) is not Tensor or ids_b.device.type != "cpu":
        raise NotServed("ids must be a plain tensor on the CPU")
    if torch._C._are_functorch_transforms_active():
        raise NotServed("a transform of torch.func is at work")
    if torch.is_autocast_enabled("cpu"):
        raise NotServed("autocast is on")
    switches = settings.current()
    if switches.deny_nan or switches.deny_inf:
        raise NotServed("guards against NaN and infinity look inside the blocks")


def _tell_modules(lm: nn.Module, reason: object) -> None:
    _tell(lm, f"modules ({reason})")


def _tell(lm: nn.Module, choice: str) -> None:
    told = _told.setdefault(lm, set())
    if choice not in told:
        told.add(choice)
        _log.info("MambaLM.step_: %s", choice)
