"""Inputs and runs of the tests of keys and queries, by angle and by quaternion."""

from typing import Any

import torch
from torch import Tensor

from anymamba.ops.keys import keys_by_angle, keys_by_quaternion
from laws import rand, randn

KINDS = ("interleaved", "half_split", "quaternion")
# Empty, short and long sequences, on and off the borders of tiles of 32 tokens.
BORDERS = (0, 0, 1, 4, 4, 32, 50, 75, 140, 140)


def make(
    kind: str,
    *,
    batch: int = 1,
    length: int = 40,
    rank: int = 1,
    groups: int = 1,
    heads: int = 2,
    size: int = 16,
    channels: int = 3,
    rows: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Return raw b and c, weights, biases, turn, dt and a state that is not the identity."""
    rows = rows or batch
    if kind == "quaternion":
        turn = randn(batch, length, heads, channels, 3, seed=7, dtype=dtype)
        initial = randn(rows, heads, channels, 4, seed=9, dtype=dtype)
    else:
        turn = randn(batch, length, channels, seed=7, dtype=dtype, scale=2.0)
        initial = randn(rows, heads, channels, seed=9, dtype=dtype)
    return [
        randn(batch, length, rank, groups, size, seed=1, dtype=dtype),
        randn(batch, length, rank, groups, size, seed=2, dtype=dtype),
        randn(size, seed=3, dtype=dtype),
        randn(size, seed=4, dtype=dtype),
        randn(heads, rank, size, seed=5, dtype=dtype),
        randn(heads, rank, size, seed=6, dtype=dtype),
        turn,
        rand(batch, length, heads, seed=8, high=0.5, dtype=dtype),
        initial,
    ]


def keys(kind: str, impl: str, **options: Any):
    """Return the operator as a function of its tensors; angles come out as cosine and sine."""

    def way(*tensors: Tensor) -> tuple[Tensor, ...]:
        if kind == "quaternion":
            return tuple(keys_by_quaternion(*tensors, impl=impl, rotation_range=2.0, **options))
        b, c, angle = keys_by_angle(*tensors, impl=impl, pairing=kind, **options)
        # Raw values may differ by a whole turn.
        return b, c, angle.cos(), angle.sin()

    return way
