"""Mamba-3 with the rotation of attention: angles that depend on the place, not on the tokens.

The paper's row "standard RoPE". The library has no such option, because it only serves as a
comparison: the rotation of a finished block is replaced by one that does not listen to the tokens.
"""

import math
from typing import Any

import torch
from torch import Tensor

import anymamba as am
from anymamba.nn import Rotation


class PositionRotation(Rotation):
    """Fixed frequencies 10000^(-i/n) and one unit step per token, as rotary embeddings have."""

    def __init__(self, rotation: Rotation) -> None:
        """Take over the sizes of a block's rotation."""
        vars(self).update(vars(rotation))
        frequencies = 10000.0 ** -(torch.arange(rotation.angles) / rotation.angles)
        # A block takes tanh(raw) * range * pi as the angle of a unit step.
        self.raw = torch.atanh(frequencies / (rotation.range * math.pi))

    def increment(self, raw: Tensor, dt_h: Tensor) -> Tensor:
        """Return what one token adds, whatever it says."""
        return super().increment(self._fixed(raw), torch.ones_like(dt_h))

    def keys(
        self, raw: Any, weights: Any, eps: Any, biases: Any, turn: Tensor, dt: Tensor, *rest: Any
    ) -> Any:
        """Turn keys and queries of a sequence, whatever the tokens say."""
        ones = torch.ones_like(dt)
        return super().keys(raw, weights, eps, biases, self._fixed(turn), ones, *rest)

    def _fixed(self, raw: Tensor) -> Tensor:
        return self.raw.to(raw).expand_as(raw)


def rotate_by_position(model: am.MambaLM) -> None:
    """Give every block of a model the rotation of attention."""
    for block in model.modules():
        if isinstance(block, am.Mamba3):
            block.rotation = PositionRotation(block.rotation)
