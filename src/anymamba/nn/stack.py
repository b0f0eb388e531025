"""A stack of pre-norm layers: a mixer, and perhaps a gated MLP, around a residual stream.

The stack knows nothing of tokens or heads. A caller brings the list of layers and says how a mixer
is run; one routine, `walk`, serves every verb. Layers hand on two tensors: the branch of the last
sublayer and the residual stream before it is added, so that the sum and the norm are one operation.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.errors import CacheError
from anymamba.nn.block import Block, is_plain
from anymamba.nn.cache import BlockCache, ModelCache
from anymamba.nn.norm import RMSNorm
from anymamba.ops import add_layer_norm, add_rms_norm

__all__ = ["Layer", "add_norm", "empty_model_cache", "walk"]

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
        self, branch: Tensor, residual: Tensor | None, cache: Any, mix: Mix
    ) -> tuple[Tensor, Tensor, Any]:
        """Add the branch to the stream, mix, and return the next branch and the stream."""
        x, residual = add_norm(self.norm, branch, residual, self.residual_in_fp32)
        branch, cache = mix(self.mixer, x, cache)
        if self.has_mlp:
            x, residual = add_norm(self.norm2, branch, residual, self.residual_in_fp32)
            branch = self.mlp(x)
        return branch, residual, cache


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


def walk(
    layers: Iterable[nn.Module], x: Tensor, caches: Sequence[BlockCache | None], mix: Mix
) -> tuple[Tensor, Tensor | None, tuple[BlockCache, ...]]:
    """Run layers one after the other.

    Args:
        layers: `Layer` modules.
        x: what enters the stream.
        caches: one per layer; None where a layer starts afresh.
        mix: how a mixer is run: `(mixer, x, cache) -> (y, cache)`.

    Returns:
        The last branch, the stream it belongs to, and the new caches.
    """
    branch, residual = x, None
    new: list[BlockCache] = []
    for layer, cache in zip(layers, caches, strict=True):
        branch, residual, after = layer(branch, residual, cache, mix)
        new.append(after)
    return branch, residual, tuple(new)


def empty_model_cache(
    layers: Iterable[nn.Module],
    batch_size: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> ModelCache:
    """Return the state of a stack before the first token."""
    caches = tuple(
        layer.mixer.empty_cache(batch_size, device=device, dtype=dtype)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        for layer in layers
    )
    if not caches:
        raise CacheError("empty_model_cache: the stack has no layers.")
    where = next(x for x in caches[0] if isinstance(x, Tensor)).device
    return ModelCache(caches, torch.zeros(batch_size, dtype=torch.int64, device=where))
