"""The states of a cache as the decoder writes them: checked once, then recognised."""

import itertools
import math
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.errors import CacheError
from anymamba.models.decoder.weights import NotServed
from anymamba.nn import MHA, KVCache, Mamba, Mamba2, ModelCache, check_past, with_room
from anymamba.ops import decode

__all__ = ["Binding", "check_states", "roomy", "tensors_of"]

_ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
# Places that keys and values grow by, at least; else by a quarter, so that each is seldom moved.
_ROOM = 64
_needs_gradient = operator.attrgetter("requires_grad")


def tensors_of(cache: ModelCache) -> list[Tensor]:
    """Return every tensor of a cache, the positions last."""
    found: list[Tensor] = []
    for layer in cache.layers:
        for value in layer:
            if isinstance(value, Tensor):
                found.append(value)
            elif value is not None:  # the rotation: angles or quaternions
                found += [part for part in value if part is not None]
    found.append(cache.position_b)
    return found


def check_states(mixers: Sequence[nn.Module], cache: ModelCache) -> list[list[Tensor]]:
    """Return the states of each layer, if the kernel can write to them.

    Keys and values may lie in any order yet: who makes room for them puts them in order.

    Raises:
        NotServed: the modules can use them, the kernel cannot.
        CacheError: nobody can.
    """
    rows = cache.position_b.shape[0]
    _check(cache.position_b, (), (torch.int64,), rows)
    return [
        _layer_states(mixer, layer, rows) for mixer, layer in zip(mixers, cache.layers, strict=True)
    ]


def roomy(cache: ModelCache) -> ModelCache:
    """Return the cache itself if a token can be written into it, else a copy that has room.

    A copy of everything: whoever holds the given cache has the state before the token, whatever
    happens after.
    """
    pasts = [layer for layer in cache.layers if isinstance(layer, KVCache)]
    if all(map(_has_room, pasts)):
        return cache
    longest = max(past.k_bhst.shape[2] for past in pasts)
    return with_room(cache, max(_ROOM, longest // 4))


def _has_room(past: KVCache) -> bool:
    is_full = past.k_bhst.shape[2] in check_past("MambaLM", past)
    return not is_full and past.k_bhst.is_contiguous() and past.v_bhst.is_contiguous()


class Binding:
    """A cache that was checked, and the call that runs on its memory."""

    def __init__(
        self,
        program: decode.Program,
        mixers: Sequence[nn.Module],
        cache: ModelCache,
        dtype: torch.dtype,
    ) -> None:
        """Check every state.

        Args:
            program: of the model.
            mixers: of its layers.
            cache: its state.
            dtype: of its logits.
        """
        states, tensors = check_states(mixers, cache), tensors_of(cache)
        _check_apart(tensors)
        self.rows = cache.position_b.shape[0]
        self.call = decode.DecodeCall(program, self.rows, states, cache.position_b, dtype)
        # Weakly: a finished cache must not live on in the model.
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._pointers = _addresses(tensors)
        self._only_in_inference = any(tensor.is_inference() for tensor in tensors)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether these are the very tensors that were checked, where they were."""
        return (
            len(tensors) == len(self._tensors)
            and all(known() is tensor for known, tensor in zip(self._tensors, tensors, strict=True))
            and self.still_lie(tensors)
        )

    def still_lie(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether the tensors that were checked lie where they did, and may be written to.

        That somebody has turned one in place, so that its axes are others, is not noticed.
        """
        if self._only_in_inference and not torch.is_inference_mode_enabled():
            return False
        return _addresses(tensors) == self._pointers and not any(map(_needs_gradient, tensors))


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _layer_states(mixer: Any, layer: Any, rows: int) -> list[Tensor]:
    # The modules would refuse these too: they are mistakes of the caller's, whoever runs the token.
    if not isinstance(layer, mixer.cache_types):
        raise CacheError(
            f"MambaLM: a {type(mixer).__name__} has no state of the type {type(layer).__name__}. "
            "Use empty_cache(batch_size)."
        )
    wide = (torch.float32,)
    if isinstance(mixer, MHA):
        return _attention_states(mixer, layer, rows)
    if isinstance(mixer, Mamba):
        _check(layer.conv_bik, (mixer.d_inner, mixer.d_conv), _ACTIVATIONS, rows)
        _check(layer.ssm_bir, (mixer.d_inner, mixer.d_state), wide, rows)
        return [layer.conv_bik, layer.ssm_bir]
    shape = (mixer.nheads, mixer.headdim, mixer.d_state)
    _check(layer.ssm_bhpr, shape, wide, rows)
    if isinstance(mixer, Mamba2):
        _check(layer.conv_bvk, (mixer.conv_dim, mixer.d_conv), _ACTIVATIONS, rows)
        return [layer.conv_bvk, layer.ssm_bhpr]
    _check(layer.k_state_bmhr, (mixer.mimo_rank, mixer.nheads, mixer.d_state), _ACTIVATIONS, rows)
    _check(layer.v_state_bhp, (mixer.nheads, mixer.headdim), _ACTIVATIONS, rows)
    turn = mixer.rotation
    is_complex = turn.kind == "complex"
    rotation = layer.rotation.angle_bha if is_complex else layer.rotation.quaternion_bhj4
    if rotation is None:
        raise CacheError(
            f"MambaLM: the state must hold {turn.kind} rotations. It comes from a model with "
            "another rotation; use empty_cache(batch_size)."
        )
    shape = (mixer.nheads, turn.angles) if is_complex else (mixer.nheads, turn.blocks, 4)
    _check(rotation, shape, wide, rows)
    return [layer.ssm_bhpr, layer.k_state_bmhr, layer.v_state_bhp, rotation]


def _attention_states(mixer: MHA, layer: KVCache, rows: int) -> list[Tensor]:
    past = (mixer.num_heads_kv, layer.k_bhst.shape[2], mixer.head_dim)
    _check_kind(layer.k_bhst, past, _ACTIVATIONS, rows)
    _check_kind(layer.v_bhst, past, (layer.k_bhst.dtype,), rows)
    _check(layer.length_b, (), (torch.int64,), rows)
    found = [layer.k_bhst, layer.v_bhst, layer.length_b]
    if (layer.conv_bvk is None) != (mixer.d_conv == 0):
        raise CacheError(
            "MambaLM: the state belongs to attention with another convolution. Use "
            "empty_cache(batch_size)."
        )
    if layer.conv_bvk is not None:
        _check(layer.conv_bvk, (mixer.qkv_dim, mixer.d_conv), _ACTIVATIONS, rows)
        found.append(layer.conv_bvk)
    return found


def _check(
    tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], rows: int
) -> None:
    """Refuse what the kernel cannot write to: another shape or dtype, or shared memory."""
    _check_kind(tensor, shape, dtypes, rows)
    is_apart = rows == 1 or tensor.stride(0) >= math.prod(shape)
    if not tensor[0].is_contiguous() or not is_apart:
        raise NotServed("each row of a state must lie in one piece of memory")


def _check_kind(
    tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], rows: int
) -> None:
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.requires_grad:
        raise NotServed("states must be plain tensors on the CPU that need no gradient")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise NotServed("states that were made in inference mode are written to only inside it")
    if tuple(tensor.shape) != (rows, *shape):
        raise CacheError(
            f"MambaLM: a state must have shape {(rows, *shape)}; got {tuple(tensor.shape)}. The "
            "first axis is the batch."
        )
    if tensor.dtype not in dtypes:
        raise NotServed(f"a state must be {dtypes[0]}, and one is {tensor.dtype}")


def _check_apart(tensors: Sequence[Tensor]) -> None:
    """Refuse states that share memory: each is written by itself."""
    spans = []
    for tensor in tensors:
        reach = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        if tensor.numel():
            start = tensor.data_ptr()
            spans.append((start, start + (reach + 1) * tensor.element_size()))
    spans.sort()
    if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
        raise NotServed("states must lie apart in memory, and two share a piece of it")
