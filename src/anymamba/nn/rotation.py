"""How a Mamba-3 block rotates its keys and queries: the choice of rotation and its state."""

import math
from typing import Any

import torch
from torch import Tensor

from anymamba.errors import ConfigError
from anymamba.nn.cache import RotationState
from anymamba.ops import (
    accumulate_dtype,
    angle_increment,
    cumulate_angles,
    cumulate_quaternions,
    keys_by_angle,
    keys_by_quaternion,
    quaternion_increment,
    quaternion_multiply,
    quaternion_normalize,
    rotate_blocks,
    rotate_pairs,
    wrap_angle,
)

__all__ = ["ROTATIONS", "Rotation"]

ROTATIONS = ("complex", "quaternion")
FRACTIONS = (0.0, 0.5, 1.0)


class Rotation:
    """A rotation's sizes and its three uses: a sequence, a token, the fixed point.

    Complex: `angles` channels, shared by heads, scaled by each head's step size. Quaternion: three
    channels per head and block. A fraction of 0 rotates nothing, but keeps one dummy channel, whose
    angle is still accumulated, so that shapes do not depend on it.
    """

    def __init__(
        self,
        kind: str,
        heads: int,
        d_state: int,
        fraction: float,
        rotation_range: float,
        is_mimo: bool,
    ) -> None:
        """Check the choice and derive the sizes."""
        if kind not in ROTATIONS:
            raise ConfigError(f"Mamba3: rotation must be one of {ROTATIONS}; got {kind!r}.")
        if fraction not in FRACTIONS:
            raise ConfigError(f"Mamba3: rope_fraction must be one of {FRACTIONS}; got {fraction}.")
        if rotation_range <= 0:
            raise ConfigError(f"Mamba3: rotation_range must be positive; got {rotation_range}.")
        if d_state % 2:
            raise ConfigError(f"Mamba3: d_state must be even; got {d_state}.")
        self.kind, self.heads, self.fraction, self.range = kind, heads, fraction, rotation_range
        self.width = int(d_state * fraction) // 2 * 2
        if kind == "quaternion" and (d_state % 4 or self.width % 4):
            raise ConfigError(
                f"Mamba3: quaternions turn blocks of 4, so d_state and the rotated part must be a "
                f"multiple of 4; got d_state={d_state}, rotated part {self.width}."
            )
        # Official weights pair entries differently with and without ranks.
        self.pairing = "half_split" if is_mimo else "interleaved"
        self.angles = max(1, self.width // 2)
        self.blocks = max(1, self.width // 4)
        self.channels = self.angles if kind == "complex" else heads * 3 * self.blocks

    def __repr__(self) -> str:
        """Name the kind, the rotated share and the range."""
        return f"{self.kind}(fraction={self.fraction}, range={self.range})"

    def fresh(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> RotationState:
        """Return the state before the first token: no rotation."""
        if self.kind == "complex":
            shape = (batch_size, self.heads, self.angles)
            return RotationState(angle_bha=torch.zeros(shape, device=device, dtype=dtype))
        shape = (batch_size, self.heads, self.blocks, 3)
        vector = torch.zeros(shape, device=device, dtype=dtype)
        return RotationState(
            quaternion_bhj4=torch.cat([torch.ones_like(vector[..., :1]), vector], -1)
        )

    def increment(self, raw: Tensor, dt_h: Tensor) -> Tensor:
        """Return what one token adds: angles (..., h, a) or unit quaternions (..., h, j, 4)."""
        if self.kind == "complex":
            return angle_increment(raw.unsqueeze(-2), dt_h.unsqueeze(-1), self.range)
        return quaternion_increment(
            raw.unflatten(-1, (self.heads, self.blocks, 3)), dt_h, self.range
        )

    def keys(
        self,
        raw: tuple[Tensor, Tensor],
        weights: tuple[Tensor, Tensor],
        eps: tuple[float, float],
        biases: tuple[Tensor, Tensor],
        turn: Tensor,
        dt_bsh: Tensor,
        state: RotationState,
        impl: str,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, RotationState]:
        """Norm, bias and rotate keys and queries of a sequence in one operator."""
        tensors, turns = (*raw, *weights, *biases), self.width > 0
        compute = accumulate_dtype(raw[0].dtype)
        if self.kind == "complex":
            b_bsmhr, c_bsmhr, final = keys_by_angle(
                *tensors,
                torch.tanh(turn.to(compute)) * (self.range * math.pi),
                dt_bsh,
                state.angle().to(compute),
                eps=eps,
                pairing=self.pairing,
                turns=turns,
                impl=impl,
                cu_seqlens=cu_seqlens,
            )
            return b_bsmhr, c_bsmhr, RotationState(angle_bha=final)
        b_bsmhr, c_bsmhr, final = keys_by_quaternion(
            *tensors,
            turn.unflatten(-1, (self.heads, self.blocks, 3)),
            dt_bsh,
            state.quaternion().to(compute),
            eps=eps,
            rotation_range=self.range,
            turns=turns,
            impl=impl,
            cu_seqlens=cu_seqlens,
        )
        return b_bsmhr, c_bsmhr, RotationState(quaternion_bhj4=final)

    def rotate(
        self,
        b_bsmhr: Tensor,
        c_bsmhr: Tensor,
        increment: Tensor,
        state: RotationState,
        impl: str,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, RotationState]:
        """Rotate keys and queries of a sequence, from a state to a state."""
        if self.kind == "complex":
            start = state.angle().to(increment.dtype)
            turn, last = cumulate_angles(increment, start, cu_seqlens=cu_seqlens)
            new = RotationState(angle_bha=last)
        else:
            turn, last = cumulate_quaternions(
                increment,
                state.quaternion().to(increment.dtype),
                impl="reference" if impl == "reference" else "auto",
                cu_seqlens=cu_seqlens,
            )
            new = RotationState(quaternion_bhj4=last)
        turn = turn.unsqueeze(2)
        return self._turn(b_bsmhr, turn), self._turn(c_bsmhr, turn), new

    def rotate_token(
        self, b_bmhr: Tensor, c_bmhr: Tensor, increment: Tensor, state: RotationState
    ) -> tuple[Tensor, Tensor, RotationState]:
        """Rotate keys and queries of one token."""
        if self.kind == "complex":
            turn = wrap_angle(state.angle().to(increment.dtype) + increment)
            new = RotationState(angle_bha=turn)
        else:
            turn = quaternion_normalize(
                quaternion_multiply(increment, state.quaternion().to(increment.dtype))
            )
            new = RotationState(quaternion_bhj4=turn)
        turn = turn.unsqueeze(1)
        return self._turn(b_bmhr, turn), self._turn(c_bmhr, turn), new

    def fixed_point_arguments(self, increment: Tensor) -> dict[str, Any]:
        """Return the rotation as the fixed point takes it."""
        if self.width == 0:
            return {}
        if self.kind == "complex":
            return {"angle_bha": increment, "pairing": self.pairing}
        return {"quaternion_bhj4": increment}

    def _turn(self, x: Tensor, turn: Tensor) -> Tensor:
        if self.width == 0:
            return x
        if self.kind == "complex":
            return rotate_pairs(x, turn, self.pairing)
        return rotate_blocks(x, turn)
