"""Chunked input bundles: the scans of each family, ready to run by any algorithm.

A bundle holds tensors that are already cut into n chunks of l tokens (`x_bnlhp`). Running it uses
only the kind of an `SsdPath`; the tensors fix the chunk length. A learnable initial state
(`init_state_hpr`) is added to the given one for every row, whatever the algorithm.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from anymamba.errors import ConfigError
from anymamba.notation import bind_dims
from anymamba.ops.checks import check_one_precision, guard
from anymamba.ops.ssd import SsdPath, add_skip, ssd_core

__all__ = [
    "Mamba2SsdInput",
    "Mamba3DoubleSsdInput",
    "Mamba3SingleSsdInput",
    "double_ssd_serial_recalculated",
    "single_ssd_serial_recalculated",
]


class _Bundle(ABC):
    """What the three bundles share: choice of algorithm, guards, the learnable initial state."""

    initial_state_bhpr: Tensor
    init_state_hpr: Tensor | None

    @abstractmethod
    def run(self, path: SsdPath) -> tuple[Tensor, Tensor]:
        """Run by the algorithm of `path`; returns the chunked output and the final state."""

    def minimal(self) -> tuple[Tensor, Tensor]:
        """Run by batched matrix products only."""
        return self.run(SsdPath.minimal())

    def serial(self) -> tuple[Tensor, Tensor]:
        """Run stages K1 to K5 with a loop over chunks."""
        return self.run(SsdPath.serial())

    def serial_recalculated(self) -> tuple[Tensor, Tensor]:
        """Run the serial forward with the recomputing backward."""
        return self.run(SsdPath.serial_recalculated())

    def sanity(self) -> None:
        """Raise on NaN or infinity in any field, if those guards are on."""
        guard(type(self).__name__, **vars(self))

    def _compute(self, path: SsdPath) -> torch.dtype:
        """Check the path and the fields' dtypes; return the dtype that sums and decays have."""
        if not isinstance(path, SsdPath):
            raise ConfigError(
                f"{type(self).__name__}.run: path must be an SsdPath; got {type(path).__name__}."
            )
        return check_one_precision(type(self).__name__, **vars(self))

    def _start(self, compute: torch.dtype) -> Tensor:
        if self.init_state_hpr is None:
            return self.initial_state_bhpr
        return self.initial_state_bhpr.to(compute) + self.init_state_hpr

    def _core(
        self,
        v_bnlmhp: Tensor,
        da_bnlh: Tensor,
        b_bnlmhr: Tensor,
        c_bnlmhr: Tensor,
        path: SsdPath,
        scale_bnlh: Tensor | None = None,
        own_bnlh: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        count, length, rank = v_bnlmhp.shape[1:4]
        y_bsmhp, final_bhpr = ssd_core(
            v_bnlmhp.flatten(1, 2),
            da_bnlh.flatten(1, 2),
            b_bnlmhr.flatten(1, 2),
            c_bnlmhr.flatten(1, 2),
            self._start(self._compute(path)),
            *(None if x is None else x.flatten(1, 2) for x in (scale_bnlh, own_bnlh)),
            path=SsdPath(path.kind, length * rank),
        )
        return y_bsmhp.unflatten(1, (count, length)), final_bhpr


@dataclass(frozen=True, eq=False)
class Mamba2SsdInput(_Bundle):
    """The Mamba-2 scan, cut into chunks; B and C per head."""

    x_bnlhp: Tensor
    dt_bnlh: Tensor
    a_decay_h: Tensor
    b_bnlhr: Tensor
    c_bnlhr: Tensor
    d_h: Tensor
    initial_state_bhpr: Tensor
    init_state_hpr: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that all fields agree on their sizes."""
        bind_dims(type(self).__name__, **vars(self))

    def run(self, path: SsdPath) -> tuple[Tensor, Tensor]:
        """Run by the algorithm of `path`; returns y_bnlhp and the final state."""
        dt_bnlh = self.dt_bnlh.to(self._compute(path))
        y_bnlmhp, final_bhpr = self._core(
            # Widened: the scan's output is rounded only after the skip.
            self.x_bnlhp.to(dt_bnlh.dtype).unsqueeze(3),
            dt_bnlh * self.a_decay_h,
            self.b_bnlhr.unsqueeze(3),
            self.c_bnlhr.unsqueeze(3),
            path,
            dt_bnlh,
        )
        y_bnlhp = add_skip(type(self).__name__, y_bnlmhp.squeeze(3), self.x_bnlhp, self.d_h)
        return y_bnlhp.to(self.x_bnlhp.dtype), final_bhpr

    ssd_minimal = _Bundle.minimal
    ssd_serial = _Bundle.serial
    ssd_serial_recalculated = _Bundle.serial_recalculated


@dataclass(frozen=True, eq=False)
class Mamba3DoubleSsdInput(_Bundle):
    """One pass of the two-pass Mamba-3 scan; v is already weighted by gamma or by beta."""

    v_bnlmhp: Tensor
    da_bnlh: Tensor
    b_bnlmhr: Tensor
    c_bnlmhr: Tensor
    initial_state_bhpr: Tensor
    init_state_hpr: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that all fields agree on their sizes."""
        bind_dims(type(self).__name__, **vars(self))

    def run(self, path: SsdPath) -> tuple[Tensor, Tensor]:
        """Run by the algorithm of `path`; returns y_bnlmhp and the final state."""
        return self._core(self.v_bnlmhp, self.da_bnlh, self.b_bnlmhr, self.c_bnlmhr, path)

    double_ssd_minimal = _Bundle.minimal
    double_ssd_serial = _Bundle.serial
    double_ssd_serial_recalculated = _Bundle.serial_recalculated


@dataclass(frozen=True, eq=False)
class Mamba3SingleSsdInput(_Bundle):
    """The one-pass Mamba-3 scan; v is raw, the boundary seed is in the initial state."""

    v_bnlmhp: Tensor
    da_bnlh: Tensor
    b_bnlmhr: Tensor
    c_bnlmhr: Tensor
    gamma_bnlh: Tensor
    scale_bnlh: Tensor
    initial_state_bhpr: Tensor
    init_state_hpr: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that all fields agree on their sizes."""
        bind_dims(type(self).__name__, **vars(self))

    def run(self, path: SsdPath) -> tuple[Tensor, Tensor]:
        """Run by the algorithm of `path`; returns y_bnlmhp and the final state."""
        return self._core(
            self.v_bnlmhp,
            self.da_bnlh,
            self.b_bnlmhr,
            self.c_bnlmhr,
            path,
            self.scale_bnlh,
            self.gamma_bnlh,
        )

    single_ssd_minimal = _Bundle.minimal
    single_ssd_serial = _Bundle.serial
    single_ssd_serial_recalculated = _Bundle.serial_recalculated


def double_ssd_serial_recalculated(
    v_bnlmhp: Tensor,
    da_bnlh: Tensor,
    b_bnlmhr: Tensor,
    c_bnlmhr: Tensor,
    initial_state_bhpr: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run one pass of the two-pass Mamba-3 scan with the recomputing backward."""
    bundle = Mamba3DoubleSsdInput(v_bnlmhp, da_bnlh, b_bnlmhr, c_bnlmhr, initial_state_bhpr)
    return bundle.serial_recalculated()


def single_ssd_serial_recalculated(
    v_bnlmhp: Tensor,
    da_bnlh: Tensor,
    b_bnlmhr: Tensor,
    c_bnlmhr: Tensor,
    gamma_bnlh: Tensor,
    scale_bnlh: Tensor,
    initial_state_bhpr: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run the one-pass Mamba-3 scan with the recomputing backward."""
    bundle = Mamba3SingleSsdInput(
        v_bnlmhp, da_bnlh, b_bnlmhr, c_bnlmhr, gamma_bnlh, scale_bnlh, initial_state_bhpr
    )
    return bundle.serial_recalculated()
