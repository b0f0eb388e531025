"""What a stack is made of, and the one routine that runs it.

`walk` inserts the registers that are due, runs the virtual layers in the order of the schedule and
hands on the residual stream. It knows no verbs: a caller says how a mixer is run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anymamba.nn.block import Block
from anymamba.nn.cache import BlockCache
from anymamba.nn.horizon import cut_of
from anymamba.nn.mlp import GatedMLP
from anymamba.nn.norm import RMSNorm
from anymamba.nn.registers import Cursor, Registers
from anymamba.nn.residual import AddStream, GateStream, Stream, make_gates
from anymamba.nn.stack_config import KINDS, StackConfig
from anymamba.nn.stack_layer import Layer, Mix, add_norm

__all__ = ["LayeredModule", "Walked"]


class Walked(NamedTuple):
    """What leaves the top of a stack: the residual stream, the new states and the new cursor.

    Without `keeps_states` there are no states.
    """

    stream: Stream
    layers: tuple[BlockCache, ...]
    cursor: Cursor | None


@dataclass
class _Progress:
    """What changes while a piece goes up the layers."""

    stream: Stream
    # Where the gradients of everything below the horizon go; None without a horizon.
    source: Tensor | None
    length: int | None
    offsets: list[int]
    is_prime: bool
    keeps_states: bool
    caches: list[Any] = field(default_factory=list)


class LayeredModule(nn.Module):
    """Layers, gates, registers and the final norm of a stack; `Stack` gives them their verbs."""

    def add_layers(self, stack_config: StackConfig, factory: dict[str, Any]) -> None:
        """Create layers, gates, registers and the final norm; a part of construction."""
        self.stack_config = stack_config
        self.schedule = stack_config.schedule
        self.layers = nn.ModuleList(
            _layer(stack_config, place, factory) for place in range(len(stack_config.specs))
        )
        self.gate_names = stack_config.gate_names
        if (gates := stack_config.residual.multi_gate) is not None:
            self.gates = make_gates(gates, self.gate_names, stack_config.d_model, factory)
        registers = stack_config.registers
        if registers is not None and registers.stack:
            self.registers = Registers(registers.stack, stack_config.d_model, **factory)
        if registers is not None and registers.layers:
            self.layer_registers = nn.ModuleDict(
                {
                    str(place): Registers(markers, stack_config.d_model, **factory)
                    for place, markers in registers.layers.items()
                }
            )
        if stack_config.final_norm:
            self.norm_f = _norm(stack_config, factory)
        self._freeze_below_horizon()

    def _freeze_below_horizon(self) -> None:
        """Freeze what no differentiated layer uses, so that no optimiser decays it."""
        cut = cut_of(self.stack_config.grad_horizon, len(self.schedule))
        trained = set(self.schedule[cut:])
        for place, layer in enumerate(self.layers):
            if place not in trained:
                layer.requires_grad_(False)
        if self.has_gates:
            used = set(self.gate_names[cut:])
            for name, gates in self.gates.items():
                if name not in used:
                    gates.requires_grad_(False)

    @property
    def has_gates(self) -> bool:
        """Whether residuals are gated."""
        return "gates" in self._modules

    @property
    def has_registers(self) -> bool:
        """Whether rows are inserted into the sequence, at any level."""
        return "registers" in self._modules or "layer_registers" in self._modules

    def mixer(self, place: int) -> Block[Any]:
        """Return the mixer of a real layer."""
        return self.layers[place].mixer  # pyright: ignore[reportReturnType]

    def _levels(self) -> list[Registers]:
        levels: list[Any] = [self.registers] if "registers" in self._modules else []
        if "layer_registers" in self._modules:
            levels += list(self.layer_registers.values())  # pyright: ignore[reportCallIssue]
        return levels

    def _first_cursor(self, length: int | None) -> Cursor | None:
        if not self.has_registers:
            return None
        return Cursor(length, (0,) * (1 + len(self.schedule)))

    def finish(self, stream: Stream) -> Tensor:
        """Return the output of a stream: its final norm, or its sum in the activations' dtype."""
        if self.stack_config.final_norm:
            in_fp32 = self.stack_config.residual_in_fp32
            return add_norm(self.norm_f, stream.branch, stream.residual, in_fp32)[0]
        if stream.residual is None:
            return stream.branch
        total = stream.branch.to(stream.residual.dtype) + stream.residual
        return total.to(stream.branch.dtype)

    def walk(
        self,
        x: Tensor,
        caches: Sequence[Any],
        cursor: Cursor | None,
        mix: Mix,
        *,
        is_prime: bool = False,
        keeps_states: bool = True,
    ) -> Walked:
        """Run the virtual layers one after the other.

        Args:
            x: what enters: a piece (batch, sequence, d_model), or tokens (batch, d_model) where
                nothing is inserted.
            caches: one per virtual layer; None where a layer starts afresh.
            cursor: how far the registers have come; None inserts none.
            mix: how a mixer is run: `(mixer, x, cache) -> (y, cache)`.
            is_prime: whether registers that wait for the token behind the piece are due now.
            keeps_states: whether new states are returned; else each one is dropped as soon as its
                layer has run, so that memory does not grow with depth.
        """
        length, offsets = (None, []) if cursor is None else (cursor.length, list(cursor.offsets))
        if cursor is not None and "registers" in self._modules:
            rows, offsets[0] = self.registers.insert(x, offsets[0], length, is_prime=is_prime)
            x, length = rows.into(x), self.registers.length_after(length)
        virtual = len(self.schedule)
        cut = cut_of(self.stack_config.grad_horizon, virtual) if torch.is_grad_enabled() else 0
        stream = GateStream.of(x) if self.has_gates else AddStream(x)
        progress = _Progress(stream, x if cut else None, length, offsets, is_prime, keeps_states)
        if progress.source is not None:
            with torch.no_grad():
                self._climb(range(cut), progress, caches, mix)
            progress.caches = [None if c is None else c.detach() for c in progress.caches]
            progress.stream = progress.stream.attached(progress.source)
            progress.source = None
        self._climb(range(cut, virtual), progress, caches, mix)
        new = None if cursor is None else Cursor(cursor.length, tuple(progress.offsets))
        return Walked(progress.stream, tuple(progress.caches), new)

    def _climb(self, span: range, progress: _Progress, caches: Sequence[Any], mix: Mix) -> None:
        virtual = len(self.schedule)
        for v in span:
            real = self.schedule[v]
            if progress.offsets and "layer_registers" in self._modules:
                self._insert_below(v, real, progress)
            name = self.gate_names[v]
            gates = None if name is None else self.gates[name]
            replaces = self.stack_config.residual.replaces(v, virtual)
            cache = caches[v]
            # Only registers leave room for a piece without a token: a prime that is yet to start.
            if progress.offsets and progress.stream.branch.shape[1] == 0:
                progress.stream = progress.stream.past(gates, replaces)
            else:
                progress.stream, cache = progress.stream.through(
                    self.layers[real], gates, cache, mix, replaces
                )
            if progress.keeps_states:
                progress.caches.append(cache)

    def _insert_below(self, v: int, real: int, progress: _Progress) -> None:
        """Insert the registers of one layer that are due."""
        if str(real) not in self.layer_registers:  # pyright: ignore[reportOperatorIssue]
            return
        level: Registers = self.layer_registers[str(real)]  # pyright: ignore[reportIndexIssue, reportAssignmentType]
        rows, progress.offsets[1 + v] = level.insert(
            progress.stream.branch,
            progress.offsets[1 + v],
            progress.length,
            is_prime=progress.is_prime,
        )
        progress.stream = progress.stream.insert(rows)
        progress.length = level.length_after(progress.length)
        if progress.source is not None:
            # Rows below the horizon train like the input does: through the carried gradient.
            with torch.enable_grad():
                progress.source = rows.into(progress.source)


def _norm(config: StackConfig, factory: dict[str, Any]) -> nn.Module:
    kind = RMSNorm if config.rms_norm else nn.LayerNorm
    return kind(config.d_model, eps=config.norm_eps, **factory)


def _layer(config: StackConfig, place: int, factory: dict[str, Any]) -> Layer:
    spec = config.specs[place]
    mixer = KINDS[spec.kind](config.d_model, **{"layer_idx": place, **spec.options}, **factory)
    norm = _norm(config, factory)
    if config.d_intermediate == 0:
        return Layer(norm, mixer, residual_in_fp32=config.residual_in_fp32)
    mlp = GatedMLP(config.d_model, config.d_intermediate, **factory)
    return Layer(norm, mixer, _norm(config, factory), mlp, config.residual_in_fp32)
