"""What the three blocks share: the verbs, packed sequences, checks of inputs and caches.

A block implements `_sequence` (a stretch of tokens), `_token` (one token) and `_fresh` (an empty
state); everything a user calls on top of that is written once, here.
"""

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from anymamba.errors import (
    CacheError,
    ConfigError,
    DeviceError,
    DtypeError,
    PackingError,
    ShapeError,
)
from anymamba.nn.cache_methods import map_tensors, named_tensors, rows, zip_tensors
from anymamba.nn.quantized import QuantizedLinear
from anymamba.nn.state_spec import StateSpec, check_state
from anymamba.ops import SsdPath, accumulate_dtype, guard, segment_rows, without_gradients

__all__ = ["Block"]

CacheT = TypeVar("CacheT", bound=tuple[Any, ...])


class Block(nn.Module, ABC, Generic[CacheT]):
    """A sequence mixer with an explicit state; `Mamba`, `Mamba2` and `Mamba3` are final."""

    cache_types: tuple[type, ...]
    d_model: int
    layer_idx: int | None
    in_proj: nn.Module

    def __init__(self) -> None:
        """Prepare the memory of `_cache_specs`."""
        super().__init__()
        self._specs_by_dtype: dict[torch.dtype, dict[str, StateSpec]] = {}

    @abstractmethod
    def _sequence(
        self,
        u_bsd: Tensor,
        cache: CacheT,
        path: SsdPath | None,
        impl: str,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, CacheT]:
        """Run a stretch of tokens from a state to a state; the arguments are checked."""

    @abstractmethod
    def _token(self, u_bd: Tensor, cache: CacheT) -> tuple[Tensor, CacheT]:
        """Run one token; the arguments are checked."""

    @abstractmethod
    def _fresh(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> CacheT:
        """Return the state before the first token, learnable initial state included."""

    def forward(
        self,
        u_bsd: Tensor,
        *,
        path: SsdPath | None = None,
        impl: str = "auto",
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """Run whole sequences from the empty state: one tensor in, one tensor out.

        Args:
            u_bsd: inputs; (batch, sequence, d_model).
            path: SSD algorithm and chunk length.
            impl: "auto", "portable", "native" or "reference".
            cu_seqlens: borders of packed sequences; batch must be 1.
            seq_idx: segment labels (batch, sequence); the state restarts where the label changes.
            inference_params: the object of `mamba_ssm`'s generation code; its dictionary then holds
                our caches.
        """
        if inference_params is not None:
            return self._with_inference_params(
                u_bsd,
                inference_params,
                path=path,
                impl=impl,
                cu_seqlens=cu_seqlens,
                seq_idx=seq_idx,
            )
        return self.prefill(
            u_bsd, None, path=path, impl=impl, cu_seqlens=cu_seqlens, seq_idx=seq_idx
        )[0]

    def prefill(
        self,
        u_bsd: Tensor,
        cache: CacheT | None = None,
        *,
        path: SsdPath | None = None,
        impl: str = "auto",
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> tuple[Tensor, CacheT]:
        """Run a piece of a sequence, from a state to a state; differentiable in both.

        Args:
            u_bsd: inputs; (batch, sequence, d_model).
            cache: state before the piece; the empty state when omitted. With `cu_seqlens` it has
                one row per sequence; with `seq_idx` it seeds the first segment of each row.
            path: SSD algorithm and chunk length.
            impl: "auto", "portable", "native" or "reference".
            cu_seqlens: borders of packed sequences; batch must be 1.
            seq_idx: segment labels; the returned cache is that of each row's last segment.
        """
        where = f"{type(self).__name__}.prefill"
        self._check_input(where, u_bsd, ("batch", "sequence", "d_model"))
        if seq_idx is not None:
            return self._segmented(where, u_bsd, cache, path, impl, cu_seqlens, seq_idx)
        count = u_bsd.shape[0] if cu_seqlens is None else _sequences(where, cu_seqlens)
        cache = self._checked(where, cache, count, u_bsd)
        y_bsd, cache = self._sequence(u_bsd, cache, path, impl, cu_seqlens)
        guard(where, y_bsd=y_bsd)
        return y_bsd, cache

    def step(self, u_bd: Tensor, cache: CacheT) -> tuple[Tensor, CacheT]:
        """Run one token: pure and differentiable; the given cache is not changed."""
        where = f"{type(self).__name__}.step"
        self._check_input(where, u_bd, ("batch", "d_model"))
        y_bd, cache = self._token(u_bd, self._checked(where, cache, u_bd.shape[0], u_bd))
        guard(where, y_bd=y_bd)
        return y_bd, cache

    @without_gradients
    def step_(self, u_bd: Tensor, cache: CacheT) -> Tensor:
        """Run one token and write the new state into the cache's own memory; inference only."""
        y_bd, new = self.step(u_bd, cache)
        cache.assign_(new)  # pyright: ignore[reportAttributeAccessIssue]
        return y_bd

    def empty_cache(
        self,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> CacheT:
        """Return the state before the first token; a learnable initial state is already in it.

        Args:
            batch_size: rows of the state.
            device: defaults to the module's.
            dtype: of the activations; defaults to the module's. The scan's state is float32 beside
                half types.
        """
        if batch_size < 1:
            raise ConfigError(
                f"{type(self).__name__}.empty_cache: batch_size must be positive; got {batch_size}."
            )
        like = self._like()
        return self._fresh(batch_size, torch.device(device or like.device), dtype or like.dtype)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int = 0, dtype: torch.dtype | None = None, **_: Any
    ) -> CacheT:
        """Return `empty_cache`, under the name and arguments `mamba_ssm` code calls."""
        return self.empty_cache(batch_size, dtype=dtype)

    def _like(self) -> Tensor:
        """Return a tensor that tells the module's device and activation dtype."""
        if type(self.in_proj) is nn.Linear:
            return self.in_proj.weight
        if isinstance(self.in_proj, QuantizedLinear):
            # Its integers are no parameters, and small parameters beside it may be wider.
            return self.in_proj.scales.new_empty(0, dtype=self.in_proj.dtype)
        for parameter in self.in_proj.parameters():
            if parameter.is_floating_point():
                return parameter
        return next(self.parameters())

    def _check_input(self, where: str, u: Tensor, axes: tuple[str, ...]) -> None:
        if not isinstance(u, Tensor) or not u.is_floating_point():
            given = u.dtype if isinstance(u, Tensor) else type(u).__name__
            raise DtypeError(f"{where}: the input must be a floating-point tensor; got {given}.")
        if u.dim() != len(axes) or u.shape[-1] != self.d_model:
            raise ShapeError(
                f"{where}: the input must have the axes ({', '.join(axes)}) with "
                f"d_model={self.d_model}; got shape {tuple(u.shape)}."
            )
        if 0 in u.shape:
            raise ShapeError(f"{where}: the input has an empty axis: {tuple(u.shape)}.")
        like = self._like()
        if u.device != like.device:
            raise DeviceError(
                f"{where}: the input is on {u.device} but the module on {like.device}. "
                "Move one of them with .to()."
            )
        # A swapped projection may take what it likes; autocast narrows what nn.Linear is given.
        mixes = type(self.in_proj) is not nn.Linear or _autocasts(u.device.type)
        same = accumulate_dtype(u.dtype) == accumulate_dtype(like.dtype)
        if not same or not (mixes or u.dtype == like.dtype):
            raise DtypeError(
                f"{where}: the input is {u.dtype} but the module {like.dtype}. "
                "Cast one of them with .to()."
            )
        guard(where, u=u)

    def _checked(self, where: str, cache: CacheT | None, count: int, u: Tensor) -> CacheT:
        """Return the cache if it fits this module and input, a fresh one if there is none."""
        like = self._like()
        if cache is None:
            return self._fresh(count, u.device, like.dtype)
        if not isinstance(cache, self.cache_types):
            expected = " or ".join(kind.__name__ for kind in self.cache_types)
            raise CacheError(
                f"{where}: the cache must be a {expected}; got {type(cache).__name__}. "
                "Use block.empty_cache(batch_size)."
            )
        wanted = self._cache_specs(like.dtype)
        given = dict(named_tensors(cache))
        if wanted.keys() != given.keys():
            raise CacheError(
                f"{where}: the cache must hold {sorted(wanted)}; got {sorted(given)}. "
                "It comes from a block with another rotation."
            )
        for name, tensor in given.items():
            check_state(where, name, tensor, count, wanted[name], u.device)
        return cache

    def _cache_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        """Return what the tensors of a cache must be beside activations of `dtype`.

        Found out once, because a single token of a small block takes little longer than this.
        """
        # A traced call must not write to the module, and pays for this while tracing only.
        if torch.compiler.is_compiling():
            return self._find_cache_specs(dtype)
        if dtype not in self._specs_by_dtype:
            self._specs_by_dtype[dtype] = self._find_cache_specs(dtype)
        return self._specs_by_dtype[dtype]

    def _find_cache_specs(self, dtype: torch.dtype) -> dict[str, StateSpec]:
        fresh = self._fresh(1, torch.device("meta"), dtype)
        return {
            name: StateSpec(tuple(tensor.shape[1:]), tensor.dtype)
            for name, tensor in named_tensors(fresh)
        }

    def _segmented(
        self,
        where: str,
        u_bsd: Tensor,
        cache: CacheT | None,
        path: SsdPath | None,
        impl: str,
        cu_seqlens: Tensor | None,
        seq_idx: Tensor,
    ) -> tuple[Tensor, CacheT]:
        """Run labelled segments as one packed row of all tokens."""
        if cu_seqlens is not None:
            raise PackingError(f"{where}: give cu_seqlens or seq_idx, not both.")
        batch, length = u_bsd.shape[:2]
        if isinstance(seq_idx, Tensor):
            if tuple(seq_idx.shape) != (batch, length):
                raise PackingError(
                    f"{where}: seq_idx must have shape {(batch, length)} like the input; "
                    f"got {tuple(seq_idx.shape)}."
                )
            seq_idx = seq_idx.to(u_bsd.device)
        segments = segment_rows(where, seq_idx)
        count = segments.cu_seqlens.shape[0] - 1
        start = self._fresh(count, u_bsd.device, self._like().dtype)
        if cache is not None:
            given = self._checked(where, cache, batch, u_bsd)
            start = zip_tensors(
                map_tensors(given, lambda x: x),
                start,
                lambda mine, fresh: fresh.index_copy(0, segments.first_b, mine.to(fresh.dtype)),
            )
        y_1sd, end = self._sequence(
            u_bsd.flatten(0, 1)[None], start, path, impl, segments.cu_seqlens
        )
        return y_1sd.view(batch, length, -1), rows(end, segments.last_b)

    def _with_inference_params(self, u_bsd: Tensor, params: Any, **options: Any) -> Tensor:
        """Serve `mamba_ssm`'s generation loop: prefill at offset 0, then single tokens."""
        where = f"{type(self).__name__}.forward"
        if self.layer_idx is None:
            raise ConfigError(
                f"{where}: inference_params need a layer_idx; pass it to the constructor."
            )
        caches = params.key_value_memory_dict
        if params.seqlen_offset == 0:
            y_bsd, caches[self.layer_idx] = self.prefill(u_bsd, None, **options)
            return y_bsd
        if self.layer_idx not in caches:
            raise CacheError(
                f"{where}: key_value_memory_dict has no entry for layer_idx {self.layer_idx}. "
                "Run the prompt at seqlen_offset 0 first, or store empty_cache(batch_size) there."
            )
        if options["cu_seqlens"] is not None or options["seq_idx"] is not None:
            raise PackingError(f"{where}: single tokens after the prompt cannot be packed.")
        self._check_input(where, u_bsd, ("batch", "sequence", "d_model"))
        if u_bsd.shape[1] != 1:
            raise ShapeError(
                f"{where}: after the prompt, inference_params decode one token at a time; got "
                f"{u_bsd.shape[1]}. Use prefill(u, cache) to continue with several."
            )
        y_bd, caches[self.layer_idx] = self.step(u_bsd[:, 0], caches[self.layer_idx])
        return y_bd.unsqueeze(1)


def _sequences(where: str, cu_seqlens: Tensor) -> int:
    """Return the number of packed sequences; the operators check the borders themselves."""
    if not isinstance(cu_seqlens, Tensor):
        raise DtypeError(
            f"{where}: cu_seqlens must be an int32 or int64 tensor; "
            f"got {type(cu_seqlens).__name__}."
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise PackingError(
            f"{where}: cu_seqlens must have one axis with at least 2 borders; "
            f"got shape {tuple(cu_seqlens.shape)}."
        )
    return cu_seqlens.shape[0] - 1


def _autocasts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
