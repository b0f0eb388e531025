"""A language model compiled into a program, and the cache that it last ran on."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from anymamba.models.decoder.layers import layer_of
from anymamba.models.decoder.states import Binding, check_states, roomy, tensors_of
from anymamba.models.decoder.weights import NotServed, Weights
from anymamba.nn import MHA, ModelCache, QuantizedEmbedding, Stack
from anymamba.ops import decode

__all__ = ["Bound", "Decoder", "decodable", "is_decodable"]

_LOGITS = (torch.float32, torch.bfloat16, torch.float16)
_Method = TypeVar("_Method", bound=Callable[..., Any])


def decodable(step: _Method) -> _Method:
    """Mark the method whose token the decoder may run; one of a subclass is without the mark."""
    step.is_decodable = True  # pyright: ignore[reportFunctionMemberAccess]
    return step


def is_decodable(step: object) -> bool:
    """Say whether a method is the marked one and not that of a subclass."""
    return getattr(step, "is_decodable", False)


class Decoder:
    """A program, the weights it was compiled from, and the cache it last ran on."""

    def __init__(self, lm: Any, weights: Weights) -> None:
        """Compile the model; what was looked at is in `weights`, whether it is served or not."""
        backbone = weights.part(lm, "backbone")
        _check_methods(lm, backbone)
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
        # What comes out has the dtype of the stream, whatever the head is made of.
        is_quantized = isinstance(embedding, QuantizedEmbedding)
        self.dtype = weights.option(embedding, "dtype") if is_quantized else embedding.weight.dtype
        if self.dtype not in _LOGITS:
            raise NotServed(f"the embedding must give float32 or a half type, not {self.dtype}")
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

    def bound(self, cache: ModelCache) -> "Bound":
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
            binding = self._binding = Binding(self.program, self.mixers, cache, self.dtype)
        return Bound(binding, cache, tensors)


class Bound(NamedTuple):
    """A call, and the cache that it runs on."""

    binding: Binding
    cache: ModelCache
    tensors: list[Tensor]

    def run(self, ids: list[int], logits_bw: Tensor | None) -> None:
        """Advance the states by a token; without a place for logits the head is left out."""
        self.binding.call.run(ids, logits_bw)
        torch.autograd.graph.increment_version(self.tensors)


def _check_methods(lm: Any, backbone: Any) -> None:
    """Refuse subclasses that run a token in their own way: they must be heard."""
    if not is_decodable(lm.step):
        raise NotServed(f"{type(lm).__name__} has a method step of its own")
    if type(backbone).token is not Stack.token:
        raise NotServed(f"{type(backbone).__name__} has a method token of its own")


def _check_stack(backbone: Any) -> None:
    config = backbone.stack_config
    if backbone.has_registers:
        raise NotServed("the stack inserts registers")
    residual = config.residual
    if residual.multi_gate is not None or residual.skip_first or residual.skip_last:
        raise NotServed("the residual is gated or replaced")
    if backbone.schedule != tuple(range(len(backbone.layers))):
        raise NotServed("virtual layers share weights")
