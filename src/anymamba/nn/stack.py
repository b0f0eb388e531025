"""A stack of layers on continuous inputs, with the verbs of a block.

The stack knows nothing of tokens or heads. One routine, `walk`, serves every verb; they differ in
how a mixer is run.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.errors import BackendError, CacheError, ConfigError, PackingError
from anymamba.nn.block import Block
from anymamba.nn.cache import KVCache, ModelCache
from anymamba.nn.registers import Cursor
from anymamba.nn.residual import Stream
from anymamba.nn.stack_cache import StackCache, StackState, stack_state
from anymamba.nn.stack_config import StackConfig
from anymamba.nn.stack_walk import LayeredModule, Walked
from anymamba.ops import SsdPath, without_gradients

__all__ = ["Stack", "StackStep", "added_positions"]


class StackStep(NamedTuple):
    """Outputs and the state after them."""

    y: Tensor
    cache: Any  # ModelCache, or StackCache with registers


class Stack(LayeredModule):
    """Layers of any mixture of families and attention, with MLPs where asked.

    Every option of `StackConfig` keeps the laws of a block: whole = pieces = steps, on values, on
    states and on gradients.

    Args:
        config: sizes and options.
        device: of the parameters.
        dtype: of the parameters; sensitive ones stay float32 beside half types.

    Example:
        >>> stack = Stack(StackConfig(d_model=8, n_layer=2, ssm_cfg={"layer": "Mamba3",
        ...     "headdim": 4, "d_state": 8}))
        >>> stack(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        config: StackConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the parameters."""
        super().__init__()
        self.add_layers(config, {"device": device, "dtype": dtype})

    def forward(
        self,
        x_bsd: Tensor,
        *,
        path: SsdPath | None = None,
        impl: str = "auto",
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> Tensor:
        """Run whole sequences from the empty state; registers lengthen them.

        Args:
            x_bsd: inputs; (batch, sequence, d_model).
            path: SSD algorithm and chunk length.
            impl: of the mixers: "auto", "portable", "native" or "reference".
            cu_seqlens: borders of packed sequences; batch must be 1, and there are no registers.
            seq_idx: segment labels (batch, sequence); not with registers.
        """
        how = {"path": path, "impl": impl, "cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
        self._check_input("Stack.forward", x_bsd, 3)
        length = x_bsd.shape[1] if self.has_registers else None
        return self.outputs(x_bsd, how, length)

    def prefill(
        self,
        x_bsd: Tensor,
        cache: StackState | None = None,
        *,
        length: int | None = None,
        path: SsdPath | None = None,
        impl: str = "auto",
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> StackStep:
        """Run a piece of a sequence from a state to a state; returns `(y, cache)`.

        Args:
            x_bsd: inputs; (batch, sequence, d_model).
            cache: state before the piece; the empty state when omitted.
            length: of the whole sequence, for middle and end registers; only without a cache,
                which knows it.
            path: SSD algorithm and chunk length.
            impl: of the mixers: "auto", "portable", "native" or "reference".
            cu_seqlens: borders of packed sequences; not with registers.
            seq_idx: segment labels; not with registers.
        """
        where = "Stack.prefill"
        how = {"path": path, "impl": impl, "cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
        self._check_input(where, x_bsd, 3)
        self.check_cache(where, cache)
        self._check_length(where, length, cache)
        return self.sequence(x_bsd, cache, how, length)

    def step(self, x_bd: Tensor, cache: StackState) -> StackStep:
        """Run one token: pure and differentiable; returns `(y_bd, cache)`.

        Registers that are due before the token run first. The output is that of the token, or of
        the end register behind it when the token closes the announced sequence.
        """
        self._check_input("Stack.step", x_bd, 2)
        self.check_cache("Stack.step", cache, is_needed=True)
        return self.token(x_bd, cache)

    @without_gradients
    def step_(self, x_bd: Tensor, cache: StackState) -> Tensor:
        """Run one token and write the new state into the cache's own memory; inference only."""
        self.check_in_place("Stack.step_", cache)
        y_bd, new = self.step(x_bd, cache)
        cache.assign_(new)  # pyright: ignore[reportAttributeAccessIssue]
        return y_bd

    def step_infinite(self, x_bd: Tensor) -> Tensor:
        """Return the limit of the outputs when the same token is fed for ever; Mamba-3 only.

        Start and custom registers are long forgotten then and do not enter.
        """
        where = "Stack.step_infinite"
        self._check_input(where, x_bd, 2)
        return self.finish(self.fixed_point(where, x_bd))

    def prime(
        self, batch_size: int, cache: StackState | None = None, *, length: int | None = None
    ) -> tuple[Tensor | None, StackState | None]:
        """Run the registers that wait for the next token, without the token.

        `prime` and then `step` is the same as `step` alone, but shows the output of the last
        register before any token is known: the start of a generation without a seed.

        Args:
            batch_size: rows.
            cache: state before; the empty state when omitted.
            length: of the whole sequence, as in `prefill`.

        Returns:
            The last register's output (batch, d_model) and the state after it; `None` and the
            given cache if no register was waiting.
        """
        self.check_cache("Stack.prime", cache)
        self._check_length("Stack.prime", length, cache)
        if not self.has_registers:
            return None, cache
        before = self.empty_cache(batch_size, length=length) if cache is None else cache
        like = self._table()
        x_bsd = like.new_zeros(before.position_b.shape[0], 0, like.shape[1])
        walked = self.walk(x_bsd, before.layers, _cursor(before), _stepwise, is_prime=True)
        if walked.stream.branch.shape[1] == 0:
            return None, cache
        y_bd = self.finish(walked.stream)[:, -1]
        return y_bd, stack_state(walked.layers, before.position_b, walked.cursor)

    def empty_cache(
        self,
        batch_size: int,
        *,
        length: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> StackState:
        """Return the state before the first token: one cache per virtual layer.

        Args:
            batch_size: rows of the state.
            length: of the whole sequence, for middle and end registers.
            device: defaults to the module's.
            dtype: of the activations; defaults to the module's.
        """
        self._check_length("Stack.empty_cache", length, None)
        caches = tuple(
            self.mixer(real).empty_cache(batch_size, device=device, dtype=dtype)
            for real in self.schedule
        )
        where = next(x for x in caches[0] if isinstance(x, Tensor)).device
        position_b = torch.zeros(batch_size, dtype=torch.int64, device=where)
        return stack_state(caches, position_b, self._first_cursor(length))

    def outputs(self, x_bsd: Tensor, how: dict[str, Any], length: int | None) -> Tensor:
        """Run `forward` on arguments that were checked; for models, which check their own.

        No state is kept: that of a virtual layer is gone before the next one runs.
        """
        return self.finish(self._run(x_bsd, None, how, length, keeps_states=False).stream)

    def sequence(
        self, x_bsd: Tensor, cache: StackState | None, how: dict[str, Any], length: int | None
    ) -> StackStep:
        """Run `prefill` on arguments that were checked; for models, which check their own."""
        walked = self._run(x_bsd, cache, how, length, keeps_states=True)
        position_b = added_positions(x_bsd, cache, how["cu_seqlens"], how["seq_idx"])
        new = stack_state(walked.layers, position_b, walked.cursor)
        return StackStep(self.finish(walked.stream), new)

    def _run(
        self,
        x_bsd: Tensor,
        cache: StackState | None,
        how: dict[str, Any],
        length: int | None,
        *,
        keeps_states: bool,
    ) -> Walked:
        if self.has_registers and (how["cu_seqlens"] is not None or how["seq_idx"] is not None):
            raise PackingError(
                f"{type(self).__name__}: registers stand at places of one sequence per row; packed "
                "sequences (cu_seqlens, seq_idx) are not offered with them. Use rows of one length."
            )
        caches = [None] * len(self.schedule) if cache is None else cache.layers
        cursor = self._first_cursor(length) if cache is None else _cursor(cache)
        return self.walk(
            x_bsd,
            caches,
            cursor,
            # Attention that looks ahead has no state, only outputs.
            lambda mixer, x, state: (
                mixer.prefill(x, state, **how) if keeps_states else (mixer.forward(x, **how), None)
            ),
            keeps_states=keeps_states,
        )

    def token(self, x_bd: Tensor, cache: StackState) -> StackStep:
        """Run `step` on arguments that were checked; for models, which check their own."""
        position_b = cache.position_b + 1
        if not self.has_registers:
            walked = self.walk(x_bd, cache.layers, None, lambda mixer, x, c: mixer.step(x, c))
            y_bd = self.finish(walked.stream)
        else:
            walked = self.walk(x_bd.unsqueeze(1), cache.layers, _cursor(cache), _stepwise)
            y_bd = self.finish(walked.stream)[:, -1]
        return StackStep(y_bd, stack_state(walked.layers, position_b, walked.cursor))

    def fixed_point(self, where: str, x_bd: Tensor) -> Stream:
        """Run `step_infinite` on an input that was checked, up to the final norm."""
        for place in range(len(self.layers)):
            if not hasattr(self.mixer(place), "step_infinite"):
                raise BackendError(
                    f"{where}: every layer must have a fixed point, which Mamba-3 has; layer "
                    f"{place} is a {type(self.mixer(place)).__name__}. Use step."
                )
        markers = [m for level in self._levels() for m in level.markers]
        if any(m.kind in ("middle", "end") for m in markers):
            raise BackendError(
                f"{where}: a sequence without an end has no middle and no end, where this stack "
                "has registers. Use step."
            )
        caches = [None] * len(self.schedule)
        return self.walk(x_bd, caches, None, lambda m, x, c: (m.step_infinite(x), None)).stream  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]

    def _table(self) -> Tensor:
        return self._levels()[0].table

    def _check_input(self, where: str, x: Tensor, rank: int) -> None:
        axes = ("batch", "sequence", "d_model") if rank == 3 else ("batch", "d_model")
        self.mixer(0)._check_input(where, x, axes)

    def _check_length(self, where: str, length: int | None, cache: StackState | None) -> None:
        if length is None:
            return
        if not self.has_registers or cache is not None:
            why = "the given cache knows it" if self.has_registers else "this stack has none"
            raise ConfigError(
                f"{where}: length announces the end to registers; {why}. Leave it out."
            )
        if length < 1:
            raise ConfigError(f"{where}: length must be positive; got {length}.")

    def check_cache(self, where: str, cache: Any, *, is_needed: bool = False) -> None:
        """Raise `CacheError` if the state is not one of this stack's."""
        if cache is None and not is_needed:
            return
        kind = StackCache if self.has_registers else ModelCache
        if not isinstance(cache, kind):
            raise CacheError(
                f"{where}: the cache must be a {kind.__name__}; got {type(cache).__name__}. "
                "Use empty_cache(batch_size)."
            )
        if len(cache.layers) != len(self.schedule):
            raise CacheError(
                f"{where}: the cache has {len(cache.layers)} layers; there must be one per virtual "
                f"layer, {len(self.schedule)}. Use empty_cache(batch_size)."
            )

    def check_in_place(self, where: str, cache: StackState) -> None:
        """Raise `BackendError` if this state cannot be updated in its own memory."""
        if any(isinstance(layer, KVCache) for layer in cache.layers):
            raise BackendError(
                f"{where}: keys and values of attention layers grow, so their cache cannot be "
                "updated in place. Use step, which returns a new cache; a language model also has "
                "advance, which seldom makes one."
            )
        if self.has_registers:
            raise BackendError(
                f"{where}: the cursor of registers is a number, not memory, so it cannot be "
                "updated in place. Use step, which returns a new cache."
            )


def _cursor(cache: StackState) -> Cursor | None:
    return cache.cursor if isinstance(cache, StackCache) else None


def _stepwise(mixer: Block[Any], x_bsd: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Run a short piece token by token: the registers that are due, and a token."""
    ys = []
    for x_bd in x_bsd.unbind(1):
        y_bd, cache = mixer.step(x_bd, cache)
        ys.append(y_bd)
    return torch.stack(ys, 1), cache


def added_positions(
    x: Tensor, cache: StackState | None, cu_seqlens: Tensor | None, seq_idx: Tensor | None
) -> Tensor:
    """Return how many tokens each row of the new cache has seen; x is (batch, sequence, ...)."""
    batch, length = x.shape[:2]
    if seq_idx is not None:
        labels = seq_idx.to(x.device)
        # Counting from the end up to the last change of label.
        same = (labels == labels[:, -1:]).flip(1).int().cumprod(1).sum(1)
        start = 0 if cache is None else torch.where(same == length, cache.position_b, 0)
        return same.to(torch.int64) + start
    if cu_seqlens is not None:
        added = cu_seqlens.to(device=x.device, dtype=torch.int64).diff()
    else:
        added = torch.full((batch,), length, dtype=torch.int64, device=x.device)
    return added if cache is None else cache.position_b + added
