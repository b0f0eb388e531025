"""Inputs of the compat functions, shared by their tests."""

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.compat import mamba_chunk_scan_combined
from anymamba.ops import ssd
from laws import rand, randn

LABELS = torch.tensor([[0, 0, 0, 1, 1, 7, 7, 7, 7], [4, 4, 4, 4, 4, 4, 4, 4, 9]])
PIECES = [(0, 0, 3), (0, 3, 5), (0, 5, 9), (1, 0, 8), (1, 8, 9)]


def scan_inputs(length: int, form: str, dtype=torch.float64) -> list[Tensor]:
    """Return u, delta, A, B, C, D, z and delta_bias for 2 rows and 6 channels."""
    shapes = {"constant": (6, 3), "plain": (2, 3, length), "grouped": (2, 2, 3, length)}
    return [
        randn(2, 6, length, seed=1, dtype=dtype),
        randn(2, 6, length, seed=2, dtype=dtype),
        -rand(6, 3, seed=3, low=0.2, high=2.0, dtype=dtype),
        randn(*shapes[form], seed=4, dtype=dtype),
        randn(*shapes[form], seed=5, dtype=dtype),
        randn(6, seed=6, dtype=dtype),
        randn(2, 6, length, seed=7, dtype=dtype),
        randn(6, seed=8, dtype=dtype),
    ]


def inner_inputs(complex_a: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a Mamba-1 block with 6 channels, state 3 and dt_rank 2."""
    state = 6 if complex_a else 3
    return {
        "xz": randn(2, 12, 7, seed=1),
        "conv1d_weight": randn(6, 1, 4, seed=2),
        "conv1d_bias": randn(6, seed=3),
        "x_proj_weight": randn(2 + 2 * state, 6, seed=4),
        "delta_proj_weight": randn(6, 2, seed=5),
        "out_proj_weight": randn(5, 6, seed=6),
        "out_proj_bias": randn(5, seed=7),
        "A": -rand(6, 3, seed=8, low=0.2),
        "D": randn(6, seed=9),
        "delta_bias": randn(6, seed=10),
    }


def ssd_inputs(batch: int, length: int, per_width: bool = False) -> list[Tensor]:
    """Return x, dt, A, B, C, D, z, dt_bias and initial states: 4 heads of 3, 2 groups of 5."""
    return [
        randn(batch, length, 4, 3, seed=1),
        randn(batch, length, 4, seed=2),
        -rand(4, seed=3, low=0.2, high=2.0),
        randn(batch, length, 2, 5, seed=4),
        randn(batch, length, 2, 5, seed=5),
        randn(*([4, 3] if per_width else [4]), seed=6),
        randn(batch, length, 4, 3, seed=7),
        randn(4, seed=8),
        randn(batch, 4, 3, 5, seed=9),
    ]


def chunk_scan(x, dt, a, b, c, skip, z, bias, initial, **options):
    """Call the official function with softplus, and the final states if nothing else is asked."""
    options = {"dt_softplus": True, "return_final_states": True, **options}
    return mamba_chunk_scan_combined(
        *(x, dt, a, b, c, 32, skip, z, bias), initial_states=initial, **options
    )


def chunk_scan_by_hand(x, dt, a, b, c, skip, z, bias, initial):
    """Run the judge of the core and gate it."""
    y, final = ssd(x, F.softplus(dt + bias), a, b, c, skip, initial, impl="reference")
    return y * F.silu(z), final


def split_inputs(mlp: int, norm: bool) -> dict[str, Tensor]:
    """Return the tensors of a Mamba-2 block: 4 heads of 3, 2 groups of 5, an MLP part."""
    inputs = {
        "zxbcdt": randn(2, 9, 2 * mlp + 12 + 32 + 4, seed=1),
        "conv1d_weight": randn(32, 4, seed=2),
        "conv1d_bias": randn(32, seed=3),
        "dt_bias": randn(4, seed=4),
        "A": -rand(4, seed=5, low=0.2),
        "D": randn(4, seed=6),
        "initial_states": randn(2, 4, 3, 5, seed=7),
        "outproj_weight": randn(7, mlp + 12, seed=8),
        "outproj_bias": randn(7, seed=9),
    }
    return inputs | ({"rmsnorm_weight": randn(12, seed=10)} if norm else {})


def conv_inputs(length: int, width: int, batch: int = 2) -> list[Tensor]:
    """Return x, weight, bias and initial states."""
    return [
        randn(batch, 6, length, seed=1),
        randn(6, width, seed=2),
        randn(6, seed=3),
        randn(batch, 6, width - 1, seed=4),
    ]
