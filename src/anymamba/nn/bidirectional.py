"""Bidirectional stacks: pairs of layers, one reading forwards and one backwards.

    y = merge(mixer_f(norm_f(x)), reverse(mixer_b(reverse(norm_b(x)))))      x <- x + y

Every place then knows both sides of the sequence. So there is no step and no state to hand on: a
token that arrives later would change all that came before it.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.errors import PackingError
from anymamba.nn.bidirectional_config import BidirectionalConfig
from anymamba.nn.block import Block
from anymamba.nn.mlp import GatedMLP
from anymamba.nn.norm import RMSNorm
from anymamba.nn.padded import insert_padded, register_places
from anymamba.nn.registers import Registers
from anymamba.nn.residual import AddStream, GateStream, make_gates
from anymamba.nn.reversal import check_lengths, reversal_index, reverse
from anymamba.nn.stack_config import KINDS
from anymamba.nn.stack_layer import add_norm
from anymamba.ops import SsdPath, segment_rows

__all__ = ["BidirectionalStack"]


class BidirectionalStack(nn.Module):
    """Pairs of layers that read a sequence from both ends.

    Args:
        config: sizes and options.
        device: of the parameters.
        dtype: of the parameters; sensitive ones stay float32 beside half types.

    Example:
        >>> config = BidirectionalConfig(d_model=8, n_layer=2, merge="cat_linear")
        >>> BidirectionalStack(config)(torch.zeros(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    def __init__(
        self,
        config: BidirectionalConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the parameters."""
        super().__init__()
        self.stack_config = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.layers = nn.ModuleList(
            Reader(_norm(config, factory), _mixer(config, place, factory))
            for place in range(len(config.specs))
        )
        self.pairs = nn.ModuleList(Pair(config, factory) for _ in range(-(-len(config.specs) // 2)))
        if (gates := config.residual.multi_gate) is not None:
            self.gates = make_gates(gates, config.gate_names, config.d_model, factory)
        if config.registers is not None:
            self.registers = Registers(config.registers.stack, config.d_model, **factory)
        if config.final_norm:
            self.norm_f = _norm(config, factory)

    def forward(
        self,
        x_bsd: Tensor,
        *,
        lengths: Tensor | None = None,
        path: SsdPath | None = None,
        impl: str = "auto",
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> Tensor:
        """Run whole sequences; registers lengthen them.

        Args:
            x_bsd: inputs; (batch, sequence, d_model).
            lengths: tokens of each row of a padded batch (batch,). Padding behind them changes no
                token; what is returned in its places means nothing.
            path: SSD algorithm and chunk length.
            impl: of the mixers: "auto", "portable", "native" or "reference".
            cu_seqlens: borders of packed sequences; batch must be 1, and there are no registers.
            seq_idx: segment labels (batch, sequence); not with registers.

        Raises:
            PackingError: two ways of saying where sequences end, or registers in packed sequences.
        """
        where = "BidirectionalStack"
        self._check(where, x_bsd, lengths, cu_seqlens, seq_idx)
        batch, length = x_bsd.shape[:2]
        if seq_idx is not None:
            cu_seqlens = segment_rows(where, seq_idx.to(x_bsd.device)).cu_seqlens
            x_bsd = x_bsd.flatten(0, 1)[None]
        if self.has_registers:
            x_bsd, lengths = insert_padded(self.registers, x_bsd, lengths)
        how = {"path": path, "impl": impl, "cu_seqlens": cu_seqlens}
        y_bsd = self._climb(x_bsd, Passage(x_bsd, lengths, how))
        return y_bsd.view(batch, length, -1) if seq_idx is not None else y_bsd

    @property
    def has_registers(self) -> bool:
        """Whether rows are inserted into the sequence."""
        return "registers" in self._modules

    def lengths_after(self, lengths: Tensor | None) -> Tensor | None:
        """Return how long the rows are with their registers; None if all are whole."""
        if lengths is None or not self.has_registers:
            return lengths
        rows = [self.registers.length_after(row) for row in lengths.tolist()]
        return torch.tensor(rows, device=lengths.device)

    def tokens_of(self, y_bsd: Tensor, length: int, lengths: Tensor | None = None) -> Tensor:
        """Return the outputs of the tokens alone, without those of registers.

        Args:
            y_bsd: what `forward` returned.
            length: places of its input.
            lengths: as given to `forward`.
        """
        if not self.has_registers:
            return y_bsd
        places_bs = register_places(self.registers, length, lengths, y_bsd.device).tokens_bs
        index_bsd = places_bs[..., None].expand(y_bsd.shape[0], -1, y_bsd.shape[2])
        return y_bsd.gather(1, index_bsd)

    def registers_of(self, y_bsd: Tensor, length: int, lengths: Tensor | None = None) -> Tensor:
        """Return the outputs of the registers in the order of the config; arguments as above.

        Raises:
            ConfigError: a custom register has no token to precede in some row.
        """
        places = register_places(self.registers, length, lengths, y_bsd.device)
        places_br = places.landed("BidirectionalStack.registers_of")
        index_brd = places_br[..., None].expand(y_bsd.shape[0], -1, y_bsd.shape[2])
        return y_bsd.gather(1, index_brd)

    def _climb(self, x_bsd: Tensor, passage: "Passage") -> Tensor:
        config = self.stack_config
        stream = GateStream.of(x_bsd) if "gates" in self._modules else AddStream(x_bsd)
        pairs = config.pairs
        for place, pair in enumerate(pairs):
            forwards, backwards = config.schedule[2 * place : 2 * place + 2]
            replaces = config.residual.replaces(place, len(pairs))
            name = config.gate_names[place]
            gates = None if name is None else self.gates[name]
            readers = self.layers[forwards], self.layers[backwards]
            # The residual kinds hand their `mix` through; a pair is told its two readers instead.
            stream, _ = stream.through(self.pairs[pair], gates, readers, passage, replaces)  # pyright: ignore[reportArgumentType]
        if config.final_norm:
            in_fp32 = config.residual_in_fp32
            return add_norm(self.norm_f, stream.branch, stream.residual, in_fp32)[0]
        if stream.residual is None:
            return stream.branch
        return (stream.branch.to(stream.residual.dtype) + stream.residual).to(stream.branch.dtype)

    def _check(
        self,
        where: str,
        x_bsd: Tensor,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        seq_idx: Tensor | None,
    ) -> None:
        mixer: Block[Any] = self.layers[0].mixer  # pyright: ignore[reportAssignmentType]
        mixer._check_input(where, x_bsd, ("batch", "sequence", "d_model"))
        if sum(given is not None for given in (lengths, cu_seqlens, seq_idx)) > 1:
            raise PackingError(f"{where}: give lengths, cu_seqlens or seq_idx, one of them.")
        if lengths is not None:
            check_lengths(where, lengths, *x_bsd.shape[:2])
        if seq_idx is not None and tuple(seq_idx.shape) != tuple(x_bsd.shape[:2]):
            raise PackingError(
                f"{where}: seq_idx must have shape {tuple(x_bsd.shape[:2])} like the input; "
                f"got {tuple(seq_idx.shape)}."
            )
        if self.has_registers and (cu_seqlens is not None or seq_idx is not None):
            raise PackingError(
                f"{where}: registers stand at places of one sequence per row; packed sequences "
                "(cu_seqlens, seq_idx) are not offered with them. Pad the batch and pass lengths."
            )


class Passage:
    """How every pair of one call runs its mixers, and how it turns the sequence around."""

    def __init__(self, x_bsd: Tensor, lengths_b: Tensor | None, how: dict[str, Any]) -> None:
        """Take the input's shape, where its sequences end, and the options of the mixers."""
        self.shape, self.device = x_bsd.shape[:2], x_bsd.device
        self.lengths_b, self.how = lengths_b, how

    @cached_property
    def index_bs(self) -> Tensor | None:
        """Where a reversed place is read from; found when borders have passed a mixer's checks."""
        batch, length = self.shape
        cu_seqlens = self.how["cu_seqlens"]
        return reversal_index(
            batch, length, self.device, lengths_b=self.lengths_b, cu_seqlens=cu_seqlens
        )

    def forwards(self, mixer: Block[Any], x_bsd: Tensor) -> Tensor:
        """Run a mixer from the first token to the last."""
        return mixer(x_bsd, **self.how)

    def backwards(self, mixer: Block[Any], x_bsd: Tensor) -> Tensor:
        """Run a mixer from the last token to the first."""
        return reverse(mixer(reverse(x_bsd, self.index_bs), **self.how), self.index_bs)


class Reader(nn.Module):
    """A norm and the mixer of one direction."""

    def __init__(self, norm: nn.Module, mixer: Block[Any]) -> None:
        """Take the parts."""
        super().__init__()
        self.norm = norm
        self.mixer = mixer

    def forward(
        self, branch: Tensor, residual: Tensor | None, in_fp32: bool, run: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what this direction reads, and the stream with the branch added."""
        x_bsd, stream = add_norm(self.norm, branch, residual, in_fp32)
        return run(self.mixer, x_bsd), stream


class Pair(nn.Module):
    """What two directions share: the merge, and perhaps a norm and an MLP behind it."""

    def __init__(self, config: BidirectionalConfig, factory: dict[str, Any]) -> None:
        """Create the parameters, if there are any."""
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        if config.merge == "cat_linear":
            self.merge = nn.Linear(2 * config.d_model, config.d_model, **factory)
        if config.d_intermediate > 0:
            self.norm2 = _norm(config, factory)
            self.mlp = GatedMLP(config.d_model, config.d_intermediate, **factory)

    def forward(
        self,
        branch: Tensor,
        residual: Tensor | None,
        readers: tuple[Reader, Reader],
        passage: Passage,
        keeps_input: bool,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Add the branch to the stream, read both ways, merge; a `Layer` without a state."""
        in_fp32 = self.residual_in_fp32
        ahead, stream = readers[0](branch, residual, in_fp32, passage.forwards)
        back, _ = readers[1](branch, residual, in_fp32, passage.backwards)
        if "merge" in self._modules:
            mixed = self.merge(torch.cat([ahead, back], dim=-1))
        else:
            mixed = (ahead + back) / 2
        if "mlp" not in self._modules:
            return mixed, stream if keeps_input else None, None
        x_bsd, stream = add_norm(self.norm2, mixed, stream, in_fp32)
        branch = self.mlp(x_bsd)
        return (branch, stream, None) if keeps_input else (mixed + branch, None, None)


def _norm(config: BidirectionalConfig, factory: dict[str, Any]) -> nn.Module:
    kind = RMSNorm if config.rms_norm else nn.LayerNorm
    return kind(config.d_model, eps=config.norm_eps, **factory)


def _mixer(config: BidirectionalConfig, place: int, factory: dict[str, Any]) -> Block[Any]:
    spec = config.specs[place]
    return KINDS[spec.kind](config.d_model, **{"layer_idx": place, **spec.options}, **factory)
