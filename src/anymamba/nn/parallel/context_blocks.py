"""Blocks of each family on one part of a sequence: from a summary of the others to the outputs.

A rank runs its tokens from nothing, which yields a summary: the state it leaves, and what it makes
of a state that comes in, one decay per head. An exclusive scan over the ranks turns summaries into
the state before each shard, whose part of the output is added:

    y[t] += exp(da[1] + ... + da[t]) S_in c[t]          S_out = S_local + exp(sum da) S_in

Rotations act on keys and queries, so they are scanned first; then the last key and value go to the
neighbour, then the states are scanned. A convolution needs the neighbour's last inputs. A Mamba-1
state decays per entry, so its correction would be a tensor of tokens times states; its second pass
runs the scan again from the true state instead. No message grows with the length.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.errors import BackendError, ShapeError
from anymamba.nn.block import Block
from anymamba.nn.cache import (
    Mamba1Cache,
    Mamba2Cache,
    Mamba3Cache,
    Mamba3DoubleSsdCache,
    RotationState,
)
from anymamba.nn.conv import convolve
from anymamba.nn.mamba1 import Mamba
from anymamba.nn.mamba2 import Mamba2, with_chunk_size
from anymamba.nn.mamba3 import Mamba3
from anymamba.nn.parallel.ring import ANGLES, QUATERNIONS, SCALES, Ring
from anymamba.nn.parallel.shard import Shard
from anymamba.nn.plain import project
from anymamba.ops import (
    SsdPath,
    TrapezoidState,
    cumulate_angles,
    cumulate_quaternions,
    full_precision,
    selective_scan,
    ssd,
    trapezoid_scan,
)

__all__ = ["WHERE", "run_of"]

WHERE = "context_parallel"


def _mamba1(
    block: Mamba,
    u_bsd: Tensor,
    cache: Mamba1Cache,
    path: SsdPath | None,
    impl: str,
    shard: Shard,
    ring: Ring,
) -> tuple[Tensor, Mamba1Cache]:
    if path is not None:
        raise BackendError(
            f"Mamba: the selective scan has no SSD path; got {path}. Leave path out."
        )
    x_bsi, z_bsi = project(block.in_proj, u_bsd).chunk(2, dim=-1)
    window_bik = _halo(x_bsi, cache.conv_bik, shard, ring)
    x_bsi, conv_bik = convolve(block.conv1d, x_bsi, window_bik, shard.cu_seqlens, impl=impl)
    dt_bsi, b_bsr, c_bsr = block._project(x_bsi, impl)
    a_ir = -block.A_log.to(dt_bsi.dtype).exp()
    how: dict[str, Any] = {"impl": impl, "cu_seqlens": shard.cu_seqlens}
    nothing = shard.enter(cache.ssm_bir, torch.zeros_like(shard.leave(cache.ssm_bir)))
    local = selective_scan(x_bsi, dt_bsi, a_ir, b_bsr, c_bsr, None, nothing, **how)
    total_bi = shard.opening(shard.rows(dt_bsi)).sum(1)
    decay_bir = (total_bi.unsqueeze(-1) * a_ir).exp() * shard.carries_b[:, None, None]
    incoming_bir = ring.exclusive_scan(SCALES, decay_bir, shard.leave(local.final_bir))
    start = shard.enter(cache.ssm_bir, incoming_bir)
    y_bsi, ssm_bir = selective_scan(
        x_bsi, dt_bsi, a_ir, b_bsr, c_bsr, block.D, start, z_bsi=z_bsi, **how
    )
    return project(block.out_proj, y_bsi), Mamba1Cache(conv_bik, ssm_bir)


def _mamba2(
    block: Mamba2,
    u_bsd: Tensor,
    cache: Mamba2Cache,
    path: SsdPath | None,
    impl: str,
    shard: Shard,
    ring: Ring,
) -> tuple[Tensor, Mamba2Cache]:
    z0, x0, z_bsi, x_bsv, dt_bsh = block._project(u_bsd)
    window_bvk = _halo(x_bsv, cache.conv_bvk, shard, ring)
    x_bsv, conv_bvk = convolve(block.conv1d, x_bsv, window_bvk, shard.cu_seqlens, impl=impl)
    x_bshp, b_bsgr, c_bsgr = block._split(x_bsv)
    a_h = -block.A_log.to(dt_bsh.dtype).exp()
    y_bshp, ssm_bhpr = ssd(
        x_bshp,
        dt_bsh,
        a_h,
        b_bsgr,
        c_bsgr,
        block._skip(),
        shard.enter(cache.ssm_bhpr, torch.zeros_like(shard.leave(cache.ssm_bhpr))),
        path=with_chunk_size(path, impl, block.chunk_size),
        impl=impl,
        cu_seqlens=shard.cu_seqlens,
    )
    y_bsmhp, ssm_bhpr = _corrected(
        y_bshp.unsqueeze(2), ssm_bhpr, dt_bsh * a_h, c_bsgr.unsqueeze(2), shard, ring
    )
    y_bsi = y_bsmhp.squeeze(2).flatten(-2)
    y_bsi = block.norm(y_bsi, z_bsi) if block.rmsnorm else y_bsi * F.silu(z_bsi)
    if block.d_mlp:
        y_bsi = torch.cat([F.silu(z0) * x0, y_bsi], dim=-1)
    return project(block.out_proj, y_bsi), Mamba2Cache(conv_bvk, ssm_bhpr)


def _mamba3(
    block: Mamba3,
    u_bsd: Tensor,
    cache: Mamba3Cache,
    path: SsdPath | None,
    impl: str,
    shard: Shard,
    ring: Ring,
) -> tuple[Tensor, Mamba3Cache]:
    z, x_bshp, b, c, coefficients, turn = block._project(u_bsd)
    increment = block.rotation.increment(turn, coefficients.dt)
    start = _rotation_before(increment, cache.rotation, shard, ring)
    b_bsmhr, c_bsmhr, rotation = block._keys(
        b, c, turn, coefficients.dt, start, impl, shard.cu_seqlens
    )
    k_bmhr, v_bhp = ring.shift(shard.rows(b_bsmhr)[:, -1], shard.rows(x_bshp)[:, -1])
    k_bmhr, v_bhp = shard.enter(cache.k_state_bmhr, k_bmhr), shard.enter(cache.v_state_bhp, v_bhp)
    v_bsmhp = block._values(x_bshp, impl)
    y_bsmhp, state = trapezoid_scan(
        v_bsmhp,
        b_bsmhr,
        c_bsmhr,
        coefficients,
        TrapezoidState(
            shard.enter(cache.ssm_bhpr, torch.zeros_like(shard.leave(cache.ssm_bhpr))),
            k_bmhr,
            block._values(v_bhp, "portable"),
        ),
        pathway="double" if isinstance(cache, Mamba3DoubleSsdCache) else "single",
        path=with_chunk_size(path, impl, block.chunk_size),
        impl=impl,
        cu_seqlens=shard.cu_seqlens,
    )
    y_bsmhp, ssm_bhpr = _corrected(y_bsmhp, state.ssm_bhpr, coefficients.da, c_bsmhr, shard, ring)
    x_last_bhp = block._last(x_bshp, cache.v_state_bhp, shard.cu_seqlens)
    new = type(cache)(
        ssm_bhpr,
        state.k_bmgr.to(cache.k_state_bmhr.dtype, copy=True),
        x_last_bhp.to(cache.v_state_bhp.dtype, copy=True),
        rotation,
    )
    return block._finish(y_bsmhp, v_bsmhp, z, impl), new


Run = Callable[..., tuple[Tensor, Any]]
_RUNS: dict[type, Run] = {Mamba: _mamba1, Mamba2: _mamba2, Mamba3: _mamba3}


def run_of(block: Block[Any]) -> Run:
    """Return what a block of this family does with its tokens.

    A function of block, tokens, state before the sequence, path, implementation, shard and ring; it
    returns the outputs and the state after the tokens.
    """
    return next(run for kind, run in _RUNS.items() if isinstance(block, kind))


def _halo(x_bsv: Tensor, window_bvk: Tensor, shard: Shard, ring: Ring) -> Tensor:
    """Return the convolution's windows before this rank's tokens."""
    width = window_bvk.shape[-1]
    if shard.length < width:
        raise ShapeError(
            f"{WHERE}: a rank must hold at least as many tokens as the convolution is wide, "
            f"{width}; got {shard.length}. Use fewer ranks or longer sequences."
        )
    (before_bvk,) = ring.shift(shard.tail(x_bsv, width).to(window_bvk.dtype))
    return shard.enter(window_bvk, before_bvk)


def _rotation_before(
    increment: Tensor, state: RotationState, shard: Shard, ring: Ring
) -> RotationState:
    """Return the rotation accumulated before this rank's tokens."""
    carries_b = shard.carries_b
    if state.angle_bha is not None:
        fresh = state.angle_bha.to(increment.dtype)
        nothing = shard.enter(fresh, torch.zeros_like(shard.leave(fresh)))
        final = cumulate_angles(increment, nothing, cu_seqlens=shard.cu_seqlens).final_bha
        flag_b = carries_b.to(increment.dtype)
        incoming = ring.exclusive_scan(ANGLES, flag_b, shard.leave(final))
        return RotationState(angle_bha=shard.enter(fresh, incoming))
    fresh = state.quaternion().to(increment.dtype)
    identity = torch.zeros_like(shard.leave(fresh))
    identity[..., 0] = 1
    final = cumulate_quaternions(
        increment, shard.enter(fresh, identity), cu_seqlens=shard.cu_seqlens
    ).final_bhj4
    last, carries = shard.leave(final), carries_b[:, None, None, None]
    none = torch.zeros_like(last)
    # A shard that began a sequence sets the rotation, any other one multiplies it.
    incoming = ring.exclusive_scan(
        QUATERNIONS, torch.where(carries, last, none), torch.where(carries, none, last)
    )
    return RotationState(quaternion_bhj4=shard.enter(fresh, incoming))


def _corrected(
    y_bsmhp: Tensor, ssm_bhpr: Tensor, da_bsh: Tensor, c_bsmgr: Tensor, shard: Shard, ring: Ring
) -> tuple[Tensor, Tensor]:
    """Add what the state before this rank's tokens does to outputs and final states."""
    da_bsh = shard.opening(shard.rows(da_bsh))
    decay_bh = da_bsh.sum(1).exp()
    handed_on = decay_bh * shard.carries_b[:, None]
    incoming_bhpr = ring.exclusive_scan(SCALES, handed_on, shard.leave(ssm_bhpr))
    incoming_bhpr = incoming_bhpr * shard.continues_b[:, None, None, None]
    c_bsmgr = shard.rows(c_bsmgr).to(incoming_bhpr.dtype)
    incoming_bgepr = incoming_bhpr.unflatten(1, (c_bsmgr.shape[3], -1))
    with full_precision(c_bsmgr):
        seen_bsmgep = torch.einsum("bsmgr,bgepr->bsmgep", c_bsmgr, incoming_bgepr)
    seen_bsmhp = seen_bsmgep.flatten(3, 4)
    seen_bsmhp = shard.opening(seen_bsmhp * da_bsh.cumsum(1).exp()[:, :, None, :, None])
    y_bsmhp = (y_bsmhp.to(seen_bsmhp.dtype) + seen_bsmhp.reshape(y_bsmhp.shape)).to(y_bsmhp.dtype)
    return y_bsmhp, shard.add(ssm_bhpr, decay_bh[..., None, None] * incoming_bhpr)
