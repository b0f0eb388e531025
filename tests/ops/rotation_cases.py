"""Inputs and comparisons of the rotation tests."""

import torch
from torch import Tensor

from anymamba.ops.rotation import cumulate_quaternions
from laws import randn

LENGTHS = (1, 2, 8, 9, 63, 64, 65, 600)
BORDERS = (
    (0, 65),
    (0, 0, 1, 40, 40, 65),
    (0, 16, 32, 64, 65),
    (0, 65, 65),
    (0, 0, 0, 65),
    tuple(range(66)),
)


def unit(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return random unit quaternions of any direction."""
    q = randn(*shape, 4, seed=seed)
    return (q / q.norm(dim=-1, keepdim=True)).to(dtype)


def turned(scan) -> tuple[Tensor, ...]:
    """Compare angles through their sine and cosine: raw values may differ by whole turns."""
    return tuple(f(x) for x in scan for f in (torch.cos, torch.sin))


def loop(increment: Tensor, initial: Tensor, cu_seqlens: Tensor | None = None):
    """Run the quaternion scan token by token."""
    return cumulate_quaternions(increment, initial, impl="reference", cu_seqlens=cu_seqlens)
