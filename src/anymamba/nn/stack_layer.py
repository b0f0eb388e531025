"""A pre-norm layer: a mixer, and perhaps a gated MLP, beside a residual stream.

Layers hand on two tensors: the branch of the last sublayer and the stream before it is added, so
that the sum and the norm are one operation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.nn.block import Block
from anymamba.nn.norm import RMSNorm
from anymamba.nn.plain import is_plain
from anymamba.ops import add_layer_norm, add_rms_norm

__all__ = ["Layer", "Mix", "add_norm"]

Mix = Callable[[Block[Any], Tensor, Any], tuple[Tensor, Any]]


class Layer(nn.Module):
    """Norm and mixer, then perhaps norm and MLP; the residual sums happen inside the norms."""

    def __init__(
        self,
        norm: nn.Module,
        mixer: Block[Any],
        norm2: nn.Module | None = None,
        mlp: nn.Module | None = None,
        residual_in_fp32: bool = True,
    ) -> None:
        """Take the parts; `norm2` and `mlp` come together."""
        super().__init__()
        if (norm2 is None) != (mlp is None):
            raise ValueError("Layer: norm2 and mlp come together; give both or neither.")
        self.residual_in_fp32 = residual_in_fp32
        self.norm = norm
        self.mixer = mixer
        if norm2 is not None and mlp is not None:
            self.norm2 = norm2
            self.mlp = mlp

    @property
    def has_mlp(self) -> bool:
        """Whether an MLP follows the mixer."""
        return "mlp" in self._modules

    def forward(
        self,
        branch: Tensor,
        residual: Tensor | None,
        cache: Any,
        mix: Mix,
        keeps_input: bool = True,
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Add the branch to the stream, mix, and return the next branch, the stream and the state.

        Args:
            branch: what the last sublayer added.
            residual: the stream before it; None at the bottom.
            cache: state of the mixer; None to start afresh.
            mix: how a mixer is run: `(mixer, x, cache) -> (y, cache)`.
            keeps_input: whether the input stays in the stream; else the branch returned is all that
                this layer adds, mixer and MLP, and there is no stream. The MLP sees the input
                either way.
        """
        x, stream = add_norm(self.norm, branch, residual, self.residual_in_fp32)
        mixed, cache = mix(self.mixer, x, cache)
        if not self.has_mlp:
            return mixed, stream if keeps_input else None, cache
        x, stream = add_norm(self.norm2, mixed, stream, self.residual_in_fp32)
        branch = self.mlp(x)
        if keeps_input:
            return branch, stream, cache
        return mixed + branch, None, cache


def add_norm(
    norm: nn.Module, branch: Tensor, residual: Tensor | None, residual_in_fp32: bool
) -> tuple[Tensor, Tensor]:
    """Return the norm of `branch + residual`, and that sum: the stream to go on with."""
    if is_plain(norm, RMSNorm):
        y, stream = add_rms_norm(
            branch,
            residual,
            norm.weight,  # pyright: ignore[reportArgumentType]
            eps=norm.eps,  # pyright: ignore[reportArgumentType]
            residual_in_fp32=residual_in_fp32,
        )
        return y, stream
    if is_plain(norm, nn.LayerNorm):
        y, stream = add_layer_norm(
            branch,
            residual,
            norm.weight,  # pyright: ignore[reportArgumentType]
            norm.bias,  # pyright: ignore[reportArgumentType]
            eps=norm.eps,  # pyright: ignore[reportArgumentType]
            residual_in_fp32=residual_in_fp32,
        )
        return y, stream
    # Hooked or swapped: the module sees the sum in the activation dtype.
    stream = branch if residual is None else branch.to(residual.dtype) + residual
    y = norm(stream.to(branch.dtype))
    if residual_in_fp32 and stream.dtype in (torch.float16, torch.bfloat16):
        stream = stream.float()
    return y, stream
