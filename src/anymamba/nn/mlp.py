"""The gated MLP of official language models."""

import torch
from torch import Tensor, nn

from anymamba.errors import ConfigError
from anymamba.nn.plain import project
from anymamba.ops import gated_product

__all__ = ["GatedMLP"]


class GatedMLP(nn.Module):
    """SwiGLU: `fc2(value * silu(gate))`; the value is the first half of `fc1`, the gate the second.

    Args:
        d_model: width of inputs and outputs.
        d_intermediate: hidden width; rounded up to `multiple_of`, as official checkpoints are.
        multiple_of: what the hidden width is a multiple of.
        bias: whether the layers have a bias.
        device: of the parameters.
        dtype: of the parameters.

    Example:
        >>> GatedMLP(8, 129).fc2.in_features
        256
    """

    def __init__(
        self,
        d_model: int,
        d_intermediate: int,
        multiple_of: int = 128,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create both layers."""
        super().__init__()
        if d_intermediate < 1:
            raise ConfigError(f"GatedMLP: d_intermediate must be positive; got {d_intermediate}.")
        hidden = -(-d_intermediate // multiple_of) * multiple_of
        self.fc1 = nn.Linear(d_model, 2 * hidden, bias=bias, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, d_model, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to the last axis."""
        value, gate = project(self.fc1, x).chunk(2, dim=-1)
        return project(self.fc2, gated_product(value, gate))
