"""Mamba-3 with the rotation of attention: angles that depend on the place, not on the tokens.

The paper's row "standard RoPE". The library has no such option, because it only serves as a
comparison: the rotation of a finished block is wrapped, and what the tokens ask for is replaced.
"""

import math
from typing import Any

import torch
from torch import Tensor

import anymamba as am


class PositionRotation:
    """A block's rotation with fixed frequencies 10000^(-i/n), as rotary position embeddings."""

    def __init__(self, rotation: Any) -> None:
        """Wrap the rotation of a block; its sizes and its state stay."""
        self.rotation = rotation
        frequencies = 10000.0 ** -(torch.arange(rotation.angles) / rotation.angles)
        # The block takes tanh(raw) * range * pi as the angle of a unit step.
        self.raw = torch.atanh(frequencies / (rotation.range * math.pi))

    def __getattr__(self, name: str) -> Any:
        """Answer all but `keys` as the wrapped rotation does."""
        return getattr(self.rotation, name)

    def keys(self, raw: Any, weights: Any, eps: Any, biases: Any, turn: Tensor, *rest: Any) -> Any:
        """Turn keys and queries by one unit step per token, whatever the tokens say."""
        dt_bsh, *others = rest
        fixed = self.raw.to(turn.dtype).expand_as(turn)
        return self.rotation.keys(
            raw, weights, eps, biases, fixed, torch.ones_like(dt_bsh), *others
        )


def rotate_by_position(model: am.MambaLM) -> None:
    """Give every block of a model the rotation of attention."""
    for block in model.modules():
        if isinstance(block, am.Mamba3):
            block.rotation = PositionRotation(block.rotation)  # pyright: ignore[reportAttributeAccessIssue]
