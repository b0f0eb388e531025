"""Inputs of the selective-scan tests, and its implementations as functions."""

import torch
from torch import Tensor

from anymamba.ops.selective_scan import selective_scan
from anymamba.ops.selective_scan.schema import SELECTIVE_SCAN
from laws import rand, randn

FORMS = ("constant", "token", "grouped")
LENGTHS = (1, 63, 64, 65)
NO_PACK = (None, None, None)


def coefficient(
    form: str, batch: int, length: int, channels: int, states: int, seed: int
) -> Tensor:
    """Return B or C in one of its three forms, or grouped with a stated number of groups."""
    if form == "constant":
        return randn(channels, states, seed=seed)
    if form == "token":
        return randn(batch, length, states, seed=seed)
    groups = int(form.removeprefix("grouped") or 2)
    return randn(batch, length, groups, states, seed=seed)


def make(
    length: int,
    *,
    batch: int = 2,
    channels: int = 6,
    states: int = 4,
    b_form: str = "token",
    c_form: str = "token",
    rows: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Return u, dt, a, b, c, skip and a random initial state."""
    sizes = (batch, length, channels, states)
    tensors = [
        randn(batch, length, channels, seed=1),
        rand(batch, length, channels, seed=2, low=0.01, high=0.5),
        -rand(channels, states, seed=3, low=0.1, high=4.0),
        coefficient(b_form, *sizes, seed=4),
        coefficient(c_form, *sizes, seed=5),
        randn(channels, seed=6),
        randn(batch if rows is None else rows, channels, states, seed=7),
    ]
    return [x.to(dtype) for x in tensors]


def reference(*args, **options):
    return selective_scan(*args, impl="reference", **options)


def fast(*args, **options):
    """The implementation in force: portable in float64, and what `kernels.running` says else."""
    return selective_scan(*args, **options)


def no_ending(u_bsi: Tensor) -> tuple[Tensor, Tensor]:
    """Return the skip and gate of no channels that the bare operator takes for none."""
    return u_bsi.new_empty(0), u_bsi.new_empty(*u_bsi.shape[:2], 0)


def with_chunk_len(chunk_len: int):
    """Return the bare operator at a given chunk length; B and C must be constant or grouped."""

    def run(u, dt, a, b, c, initial):
        nothing = no_ending(u)
        flags = (b.dim() == 2, c.dim() == 2, chunk_len)
        return SELECTIVE_SCAN(u, dt, a, b, c, initial, *nothing, *flags, *NO_PACK)

    return run
