"""Norms as modules: the parameter, and a call into `ops`."""

import torch
from torch import Tensor, nn

from anymamba.ops import gated_rms_norm, rms_norm

__all__ = ["RMSNorm", "RMSNormGated"]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, statistics in float32 beside half types."""

    def __init__(
        self,
        size: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the weight, ones."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return rms_norm(x, self.weight, eps=self.eps)

    def extra_repr(self) -> str:
        """Name the size."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class RMSNormGated(nn.Module):
    """Root-mean-square norm in groups, gated by silu(z) before or after."""

    def __init__(
        self,
        size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the weight, ones."""
        super().__init__()
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Normalise and gate."""
        return gated_rms_norm(
            x,
            z,
            self.weight,
            eps=self.eps,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
        )

    def extra_repr(self) -> str:
        """Name the sizes and the order."""
        return (
            f"{self.weight.shape[0]}, group_size={self.group_size}, eps={self.eps}, "
            f"norm_before_gate={self.norm_before_gate}"
        )
