"""Sizes and options of a bidirectional stack."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from anymamba.errors import ConfigError
from anymamba.nn.schedule import make_bidirectional_schedule
from anymamba.nn.stack_config import StackConfig

__all__ = ["BidirectionalConfig"]

MERGES = ("mean", "cat_linear")


@dataclass(frozen=True, kw_only=True)
class BidirectionalConfig(StackConfig):
    """Sizes and options of a `BidirectionalStack`: those of a `StackConfig`, in pairs of layers.

    Real layers 0, 2, 4, ... read forwards and 1, 3, 5, ... backwards, unless `virtual` says
    otherwise. A pair is the unit of everything else: it has one merge, one MLP and one residual
    sum, or one set of gates; pair i of the merges and MLPs belongs to real layers 2i and 2i + 1,
    and is chosen by the layer that reads forwards. `residual.skip_first` and `skip_last` speak of
    pairs. Registers enter below the first pair; per-layer registers and `grad_horizon` are refused.

    Args:
        merge: "mean" of both directions, or "cat_linear": a linear map of both, 2 d to d.

    Example:
        >>> config = BidirectionalConfig(d_model=8, n_layer=2, merge="cat_linear")
        >>> BidirectionalConfig.from_dict(config.to_dict()) == config
        True
    """

    merge: str = "mean"

    @cached_property
    def schedule(self) -> tuple[int, ...]:
        """The real layer of each virtual one; even places read forwards, odd ones backwards."""
        real = len(self.specs)
        if self.virtual is None:
            if real == 0 or real % 2:
                raise ConfigError(
                    f"BidirectionalConfig: layers come in pairs, so their number must be even; got "
                    f"{real}. Or share them: virtual=VirtualLayers({2 * real}, 'symmetric_cyclic')."
                )
            return tuple(range(real))
        return make_bidirectional_schedule(self.virtual.schedule, self.virtual.count, real)

    @cached_property
    def pairs(self) -> tuple[int, ...]:
        """Which merge, MLP and set of shared gates each virtual pair uses."""
        return tuple(forwards // 2 for forwards in self.schedule[::2])

    @property
    def joined(self) -> tuple[int, ...]:
        """What the residual joins: pairs."""
        return self.pairs

    @property
    def has_pair_parameters(self) -> bool:
        """Whether something with weights belongs to a pair of real layers."""
        return self.merge == "cat_linear" or self.d_intermediate > 0

    def _check_joints(self) -> None:
        where = "BidirectionalConfig"
        if self.merge not in MERGES:
            raise ConfigError(f"{where}: merge must be one of {MERGES}; got {self.merge!r}.")
        if self.grad_horizon is not None:
            raise ConfigError(
                f"{where}: grad_horizon is not offered for pairs of layers; got "
                f"{self.grad_horizon}. Leave it out."
            )
        if self.registers is not None and self.registers.layers:
            raise ConfigError(
                f"{where}: registers enter below the first pair; registers.layers names layers "
                f"{sorted(self.registers.layers)}. Use registers.stack."
            )
        for spec in self.specs:
            if spec.kind == "MHA" and not spec.options.get("causal", False):
                raise ConfigError(
                    f"{where}: each direction sees what lies behind it, so attention must be "
                    "causal. Put causal=True into its options."
                )
        self._check_pairs(where)
        self._check_gates(where, len(self.pairs))

    def _check_pairs(self, where: str) -> None:
        many = -(-len(self.specs) // 2)
        idle = sorted(set(range(many)) - set(self.pairs))
        if self.has_pair_parameters and idle:
            raise ConfigError(
                f"{where}: the merge of every pair must be used, or it would never train; the "
                f"layers that read forwards leave out pairs {idle}. Change the schedule, or use "
                "merge='mean' without an MLP."
            )

    def _check_gates(self, where: str, virtual_pairs: int) -> None:
        gates = self.residual.multi_gate
        if gates is None:
            return
        places = range(virtual_pairs)
        joined = sum(not self.residual.replaces(place, virtual_pairs) for place in places)
        if not joined or gates.n_stream > joined + 1:
            raise ConfigError(
                f"{where}: {joined} pairs that keep their input fill at most {joined + 1} streams, "
                f"and one is needed; got n_stream={gates.n_stream}."
            )

    @classmethod
    def from_dict(cls, entries: dict[str, Any]) -> "BidirectionalConfig":
        """Build from the result of `to_dict`; an unknown key is refused."""
        config = super().from_dict(entries)
        assert isinstance(config, BidirectionalConfig)
        return config
