"""The decoder of a model: compiled at the first token, compiled again when the model changes."""

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anymamba import settings
from anymamba.errors import BackendError, ShapeError
from anymamba.models.decoder.layers import layer_of
from anymamba.models.decoder.states import Binding, check_states, roomy, tensors_of
from anymamba.models.decoder.weights import NotServed, Weights
from anymamba.models.inputs import check_known, check_rows
from anymamba.nn import MHA, ModelCache, QuantizedEmbedding
from anymamba.ops import decode, native_status

__all__ = ["doubt_copies", "native_refusal", "native_step", "unchanged"]

_log = logging.getLogger("anymamba.models")
_log.addHandler(logging.NullHandler())
_told: "weakref.WeakKeyDictionary[nn.Module, set[str]]" = weakref.WeakKeyDictionary()
# Beside the models: a copy of a model, or a pickled one, must not carry addresses.
_decoders: "weakref.WeakKeyDictionary[nn.Module, _Decoder]" = weakref.WeakKeyDictionary()


class _Promise:
    """That a model does not change: how often it was given, and the decoder that was looked at."""

    def __init__(self) -> None:
        """Begin before it is given."""
        self.depth = 0
        self.decoder: _Decoder | None = None
        self.memory: list[Tensor] = []

    def trust(self, decoder: "_Decoder") -> None:
        """Look at this decoder's weights no more."""
        self.decoder = decoder
        # A promise may be broken: what the kernel reads then is old, but still there.
        self.memory = decoder.weights.aliases()


class _Promises(threading.local):
    """The promises of one thread: what another does to a model, nobody here can know."""

    def __init__(self) -> None:
        """Begin without any."""
        self.given: weakref.WeakKeyDictionary[nn.Module, _Promise] = weakref.WeakKeyDictionary()


_promises = _Promises()


class _Decoder:
    """A program, the weights it was compiled from, and the cache it last ran on."""

    def __init__(self, lm: Any) -> None:
        """Compile the model."""
        weights = Weights()
        backbone = weights.part(lm, "backbone")
        _check_stack(backbone)
        embedding = weights.module(backbone, "embedding", nn.Embedding, QuantizedEmbedding)
        if getattr(embedding, "max_norm", None) is not None:
            raise NotServed("the embedding renormalises its rows (max_norm)")
        table = weights.table(embedding)
        width = table.columns
        head = weights.matrix(lm, "lm_head", None, width)
        layers = weights.part(backbone, "layers")
        found = [layer_of(weights, layers, place, width) for place in range(len(layers))]
        self.weights, self.vocabulary, self.head_rows = weights, table.rows, head.rows
        self.mixers = [mixer for _, mixer in found]
        self.has_attention = any(isinstance(mixer, MHA) for mixer in self.mixers)
        self.program = decode.program_of(
            [layer for layer, _ in found],
            width,
            table,
            weights.norm(backbone, "norm_f", width),
            head,
        )
        self.dtype = lm.lm_head.dtype if hasattr(lm.lm_head, "dtype") else lm.lm_head.weight.dtype
        self._binding: Binding | None = None
        self.is_doubted = False

    def is_current(self, *, closely: bool) -> bool:
        """Say whether the model is the one that was compiled, to the bit if looked at closely."""
        if not self.weights.are_current():
            return False
        if (closely or self.is_doubted) and not self.weights.copies_are_true():
            return False
        self.is_doubted = False
        return True

    def bound(self, cache: ModelCache) -> "_Bound":
        """Return the call on this cache's memory, or on that of a copy with room for a token."""
        tensors, binding = tensors_of(cache), self._binding
        if binding is not None and not binding.fits(tensors):
            binding = None
        if self.has_attention:
            # The given states first: what is wrong with them should be said of them.
            if binding is None:
                check_states(self.mixers, cache)
            larger = roomy(cache)
            if larger is not cache:
                cache, tensors, binding = larger, tensors_of(larger), None
        if binding is None:
            binding = self._binding = Binding(self.program, self.mixers, cache)
        return _Bound(binding, cache, tensors)


class _Bound(NamedTuple):
    """A call, and the cache that it runs on."""

    binding: Binding
    cache: ModelCache
    tensors: list[Tensor]


def _check_stack(backbone: Any) -> None:
    config = backbone.stack_config
    if backbone.has_registers:
        raise NotServed("the stack inserts registers")
    residual = config.residual
    if residual.multi_gate is not None or residual.skip_first or residual.skip_last:
        raise NotServed("the residual is gated or replaced")
    if backbone.schedule != tuple(range(len(backbone.layers))):
        raise NotServed("virtual layers share weights")


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
            _decoder_of(lm, ids_b)
        else:
            backbone: Any = lm.backbone
            backbone.check_cache("native_refusal", cache, is_needed=True)
            check_rows("native_refusal", ids_b, cache.position_b.shape[0])
            _prepare(lm, ids_b, cache)
    except NotServed as reason:
        return str(reason)
    return None


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
        landing_bw: where the kernel writes the logits; a new tensor by default.

    Returns:
        The logits (batch, padded vocabulary) and the cache after the token, or None.

    Raises:
        BackendError: with impl="native", the reason.
        ConfigError: the embedding has no such id.
        CacheError: a state of another family or shape.
        ShapeError: `landing_bw` does not fit.
    """
    try:
        decoder, (binding, cache, tensors) = _prepare(lm, ids_b, cache)
    except NotServed as reason:
        if impl == "native":
            raise BackendError(
                f"MambaLM: impl='native' cannot serve this token: {reason}. "
                "Use impl='auto' or impl='portable'."
            ) from None
        _tell(lm, f"modules ({reason})")
        return None
    _tell(lm, "native decoder")
    logits_bw = _landing(landing_bw, binding.rows, decoder.head_rows)
    binding.call.run(ids_b.to(torch.int64).contiguous(), logits_bw)
    torch.autograd.graph.increment_version(tensors)
    return logits_bw if decoder.dtype == torch.float32 else logits_bw.to(decoder.dtype), cache


def _landing(given_bw: Tensor | None, rows: int, entries: int) -> Tensor:
    if given_bw is None:
        return torch.empty(rows, entries, dtype=torch.float32, device="cpu")
    fits = given_bw.shape == (rows, entries) and given_bw.dtype == torch.float32
    if not fits or not given_bw.is_contiguous() or given_bw.device.type != "cpu":
        raise ShapeError(
            f"MambaLM.advance: landing_bw must be contiguous float32 of shape {(rows, entries)} on "
            f"the CPU; got {given_bw.dtype} of shape {tuple(given_bw.shape)} on {given_bw.device}."
        )
    return given_bw


def _prepare(lm: nn.Module, ids_b: Tensor, cache: ModelCache) -> tuple[_Decoder, _Bound]:
    decoder = _decoder_of(lm, ids_b)
    check_known("MambaLM", ids_b, decoder.vocabulary)
    return decoder, decoder.bound(cache)


def _decoder_of(lm: nn.Module, ids_b: Tensor) -> _Decoder:
    _check_call(ids_b)
    decoder, promise = _decoders.get(lm), _promises.given.get(lm)
    if decoder is not None and promise is not None and promise.decoder is decoder:
        return decoder
    if decoder is None or not decoder.is_current(closely=promise is not None):
        _decoders.pop(lm, None)
        decoder = _decoders[lm] = _Decoder(lm)
    if promise is not None:
        promise.trust(decoder)
    return decoder


def _check_call(ids_b: Tensor) -> None:
    if (why_not := native_status().why_not) is not None:
        raise NotServed(why_not)
    if type(ids_b) is not Tensor or ids_b.device.type != "cpu":
        raise NotServed("ids must be a plain tensor on the CPU")
    if len(ids_b) > decode.MOST_ROWS:
        raise NotServed(
            f"at most {decode.MOST_ROWS} rows decode together, and there are {len(ids_b)}"
        )
    if torch._C._are_functorch_transforms_active():
        raise NotServed("a transform of torch.func is at work")
    if torch.is_autocast_enabled("cpu"):
        raise NotServed("autocast is on")
    switches = settings.current()
    if switches.deny_nan or switches.deny_inf:
        raise NotServed("guards against NaN and infinity look inside the blocks")


def _tell(lm: nn.Module, choice: str) -> None:
    told = _told.setdefault(lm, set())
    if choice not in told:
        told.add(choice)
        _log.info("MambaLM.step_: %s", choice)
