"""The scans of all families in one shape, so that a tour can try the same laws on each.

A `Scan` maps tokens (tensors with a time axis) and a state (tensors without) to an output and a new
state. Rotations are part of the Mamba-3 scans, as they are in the blocks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.ops import (
    TrapezoidCoefficients,
    TrapezoidState,
    angle_increment,
    cumulate_angles,
    cumulate_quaternions,
    quaternion_increment,
    rotate_blocks,
    rotate_pairs,
    selective_scan,
    selective_scan_step,
    ssd,
    ssd_step,
    trapezoid_scan,
    trapezoid_step,
)

__all__ = ["Scan", "all_scans"]

Tensors = list[Tensor]
HEADS, WIDTH, STATE, CHANNELS = 4, 16, 16, 32


class Scan(NamedTuple):
    """One family's scan, with random tokens and a random state to run it on."""

    name: str
    run: Callable[..., tuple[Tensor, Tensors]]  # (tokens, state, **how) -> y, state
    step: Callable[[Tensors, Tensors], tuple[Tensor, Tensors]]  # the same for one token
    tokens: Tensors
    state: Tensors
    has_paths: bool = True


def all_scans(length: int, seed: int = 0) -> list[Scan]:
    """Return every scan with tokens of `length` and a random, non-zero state."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random)

    return [
        _mamba1(length, normal, uniform),
        _mamba2(length, normal, uniform),
        _mamba3("Mamba-3", length, normal, uniform),
        _mamba3("Mamba-3 two passes", length, normal, uniform, pathway="double"),
        _mamba3("Mamba-3 MIMO 4", length, normal, uniform, rank=4),
        _mamba3("Mamba-3 quaternion", length, normal, uniform, quaternion=True),
    ]


def _mamba1(length: int, normal: Any, uniform: Any) -> Scan:
    a_ir = -1 - 15 * uniform(CHANNELS, STATE)

    def run(tokens: Tensors, state: Tensors, **how: Any) -> tuple[Tensor, Tensors]:
        u_bsi, dt_bsi, b_bsr, c_bsr = tokens
        y_bsi, final_bir = selective_scan(u_bsi, dt_bsi, a_ir, b_bsr, c_bsr, None, state[0], **how)
        return y_bsi, [final_bir]

    def step(tokens: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        u_bi, dt_bi, b_br, c_br = tokens
        y_bi, state_bir = selective_scan_step(u_bi, dt_bi, a_ir, b_br, c_br, None, state[0])
        return y_bi, [state_bir]

    tokens = [normal(1, length, CHANNELS), 0.1 * uniform(1, length, CHANNELS)]
    tokens += [normal(1, length, STATE), normal(1, length, STATE)]
    return Scan("Mamba-1", run, step, tokens, [normal(1, CHANNELS, STATE)], False)


def _mamba2(length: int, normal: Any, uniform: Any) -> Scan:
    a_h = -1 - 15 * uniform(HEADS)

    def run(tokens: Tensors, state: Tensors, **how: Any) -> tuple[Tensor, Tensors]:
        x_bshp, dt_bsh, b_bsgr, c_bsgr = tokens
        y_bshp, final_bhpr = ssd(x_bshp, dt_bsh, a_h, b_bsgr, c_bsgr, None, state[0], **how)
        return y_bshp, [final_bhpr]

    def step(tokens: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        x_bhp, dt_bh, b_bgr, c_bgr = tokens
        y_bhp, state_bhpr = ssd_step(x_bhp, dt_bh, a_h, b_bgr, c_bgr, None, state[0])
        return y_bhp, [state_bhpr]

    tokens = [normal(1, length, HEADS, WIDTH), 0.1 * uniform(1, length, HEADS)]
    tokens += [normal(1, length, 1, STATE), normal(1, length, 1, STATE)]
    return Scan("Mamba-2", run, step, tokens, [normal(1, HEADS, WIDTH, STATE)])


def _mamba3(
    name: str,
    length: int,
    normal: Any,
    uniform: Any,
    rank: int = 1,
    quaternion: bool = False,
    pathway: str = "single",
) -> Scan:
    pairing = "interleaved" if rank == 1 else "half_split"

    def turn(
        b: Tensor, c: Tensor, dt_bsh: Tensor, raw: Tensor, start: Tensor, cu_seqlens: Any
    ) -> Tensors:
        if quaternion:
            increment = quaternion_increment(raw, dt_bsh)
            turned, last = cumulate_quaternions(increment, start, cu_seqlens=cu_seqlens)
            return [*(rotate_blocks(x, turned.unsqueeze(2)) for x in (b, c)), last]
        increment = angle_increment(raw, dt_bsh.unsqueeze(-1))
        turned, last = cumulate_angles(increment, start, cu_seqlens=cu_seqlens)
        return [*(rotate_pairs(x, turned.unsqueeze(2), pairing) for x in (b, c)), last]

    def run(tokens: Tensors, state: Tensors, **how: Any) -> tuple[Tensor, Tensors]:
        v_bsmhp, b, c, dt_bsh, decay_bsh, lam_bsh, raw = tokens
        b_bsmhr, c_bsmhr, last = turn(b, c, dt_bsh, raw, state[0], how.get("cu_seqlens"))
        coefficients = TrapezoidCoefficients(dt_bsh, -dt_bsh * decay_bsh, lam_bsh)
        before = TrapezoidState(*state[1:])
        y_bsmhp, new = trapezoid_scan(
            v_bsmhp, b_bsmhr, c_bsmhr, coefficients, before, pathway=pathway, **how
        )
        return y_bsmhp, [last, *new]

    def step(tokens: Tensors, state: Tensors) -> tuple[Tensor, Tensors]:
        v_bmhp, b, c, dt_bh, decay_bh, lam_bh, raw = tokens
        b, c, dt_bsh, raw = (x.unsqueeze(1) for x in (b, c, dt_bh, raw))
        b_bsmhr, c_bsmhr, last = turn(b, c, dt_bsh, raw, state[0], None)
        coefficients = TrapezoidCoefficients(dt_bh, -dt_bh * decay_bh, lam_bh)
        before = TrapezoidState(*state[1:])
        y_bmhp, new = trapezoid_step(
            v_bmhp, b_bsmhr.squeeze(1), c_bsmhr.squeeze(1), coefficients, before
        )
        return y_bmhp, [last, *new]

    tokens = [normal(1, length, rank, HEADS, WIDTH)]
    tokens += [normal(1, length, rank, HEADS, STATE) for _ in range(2)]
    tokens += [0.5 * uniform(1, length, HEADS), 2 * uniform(1, length, HEADS)]
    tokens += [uniform(1, length, HEADS)]
    if quaternion:
        tokens += [normal(1, length, HEADS, STATE // 4, 3)]
        rotation = torch.nn.functional.normalize(normal(1, HEADS, STATE // 4, 4), dim=-1)
    else:
        tokens += [normal(1, length, 1, STATE // 4)]
        rotation = normal(1, HEADS, STATE // 4)
    state = [rotation, normal(1, HEADS, WIDTH, STATE)]
    state += [normal(1, rank, HEADS, STATE), normal(1, rank, HEADS, WIDTH)]
    return Scan(name, run, step, tokens, state)
