"""Context parallelism: a sequence on several ranks, each with its tokens, states passed on.

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
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.errors import BackendError, ConfigError, ShapeError
from anymamba.nn.attention import MHA
from anymamba.nn.bidirectional import BidirectionalStack
from anymamba.nn.block import Block, project
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
from anymamba.nn.parallel.shard import Shard, dense_shard, packed_shard, reject_packed_cache
from anymamba.nn.registers import Registers
from anymamba.nn.stack import Stack, StackStep
from anymamba.ops import (
    SsdPath,
    TrapezoidState,
    cumulate_angles,
    cumulate_quaternions,
    guard,
    selective_scan,
    ssd,
    trapezoid_scan,
)

__all__ = ["context_parallel"]

WHERE = "context_parallel"


def context_parallel(model: nn.Module, group: "dist.ProcessGroup | None" = None) -> Ring:
    """Make every block of a model run its tokens as one part of a longer sequence.

    `forward` and `prefill` then take this rank's tokens, the same number on every rank, in the
    order of the ranks. A given cache is the state before the whole sequence, and the first rank's
    counts; the one that is returned is the state after this rank's tokens. Packing (`cu_seqlens`,
    `seq_idx`) describes the whole rows of all ranks; the cache then has a row for each sequence
    with tokens here (`cu_seqlens`), or is that of each row's last segment (`seq_idx`). Gradients of
    parameters are this rank's share; their sum over the ranks is the gradient.

    Args:
        model: a block, a stack or a model of them; changed in place.
        group: processes that share a sequence; None is the whole world.

    Returns:
        The line of processes, which counts the bytes it sends.

    Raises:
        BackendError: a layer cannot hand on a state of fixed size.
        ConfigError: there is no block.
    """
    blocks = []
    for name, module in model.named_modules():
        if why := _refusal(module):
            raise BackendError(f"{WHERE}: {name or 'the model'} cannot be shared out: {why}")
        if isinstance(module, Block):
            blocks.append(module)
    if not blocks:
        raise ConfigError(f"{WHERE}: the model must have a Mamba block; it has none.")
    ring = Ring(group)
    for block in blocks:
        block.prefill = _Prefill(block, ring)  # pyright: ignore[reportAttributeAccessIssue]
    for module in model.modules():
        if isinstance(module, Stack):
            module.sequence = _Sequence(module, ring)  # pyright: ignore[reportAttributeAccessIssue]
    return ring


def _refusal(module: nn.Module) -> str | None:
    if isinstance(module, MHA):
        return (
            "attention reads every earlier key and value, not a state of fixed size. Use layers of "
            "Mamba, or keep whole sequences on a rank."
        )
    if isinstance(module, BidirectionalStack):
        return "half of its layers read backwards. Keep whole sequences on a rank."
    if isinstance(module, Registers):
        return "registers stand at places of a whole sequence. Keep whole sequences on a rank."
    return None


class _Prefill:
    """`prefill` of a block whose tokens are one part of a sequence."""

    def __init__(self, block: Block[Any], ring: Ring) -> None:
        self.block, self.ring = block, ring
        self.run = next(run for kind, run in _RUNS.items() if isinstance(block, kind))

    def __call__(
        self,
        u_bsd: Tensor,
        cache: Any = None,
        *,
        path: SsdPath | None = None,
        impl: str = "auto",
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Run this rank's tokens, from the state before the whole sequence."""
        block = self.block
        where = f"{type(block).__name__}.prefill"
        block._check_input(where, u_bsd, ("batch", "sequence", "d_model"))
        batch, length = u_bsd.shape[:2]
        if cu_seqlens is None and seq_idx is None:
            shard = dense_shard(u_bsd, self.ring.rank)
            cache = block._checked(where, cache, batch, u_bsd)
        else:
            reject_packed_cache(where, cache)
            shard = packed_shard(where, u_bsd, self.ring.rank, self.ring.size, cu_seqlens, seq_idx)
            assert shard.cu_seqlens is not None
            count = shard.cu_seqlens.shape[0] - 1
            cache = block._fresh(count, u_bsd.device, block._like().dtype)
            u_bsd = u_bsd.flatten(0, 1)[None]
        y_bsd, cache = self.run(block, u_bsd, cache, path, impl, shard, self.ring)
        guard(where, y_bsd=y_bsd)
        if seq_idx is not None:
            cache = cache.rows(shard.last_b)
        return y_bsd.reshape(batch, length, -1), cache


class _Sequence:
    """`sequence` of a stack whose tokens are one part of a sequence: positions count all ranks."""

    def __init__(self, stack: Stack, ring: Ring) -> None:
        self.stack, self.ring = stack, ring

    def __call__(
        self, x_bsd: Tensor, cache: Any, how: dict[str, Any], length: int | None
    ) -> StackStep:
        y_bsd, new = type(self.stack).sequence(self.stack, x_bsd, cache, how, length)
        borders, labels = how["cu_seqlens"], how["seq_idx"]
        ring = self.ring
        if borders is None and labels is None:
            position_b = new.position_b + ring.rank * x_bsd.shape[1]
        else:
            shard = packed_shard("Stack.prefill", x_bsd, ring.rank, ring.size, borders, labels)
            assert shard.seen_q is not None
            position_b = shard.seen_q if labels is None else shard.leave(shard.seen_q)
        return StackStep(y_bsd, new._replace(position_b=position_b))


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
    dt_bsi, b_bsr, c_bsr = block._project(x_bsi)
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
    v_bsmhp = block._values(x_bshp)
    y_bsmhp, state = trapezoid_scan(
        v_bsmhp,
        b_bsmhr,
        c_bsmhr,
        coefficients,
        TrapezoidState(
            shard.enter(cache.ssm_bhpr, torch.zeros_like(shard.leave(cache.ssm_bhpr))),
            k_bmhr,
            block._values(v_bhp),
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
    with _full_precision(c_bsmgr):
        seen_bsmgep = torch.einsum("bsmgr,bgepr->bsmgep", c_bsmgr, incoming_bgepr)
    seen_bsmhp = seen_bsmgep.flatten(3, 4)
    seen_bsmhp = shard.opening(seen_bsmhp * da_bsh.cumsum(1).exp()[:, :, None, :, None])
    y_bsmhp = (y_bsmhp.to(seen_bsmhp.dtype) + seen_bsmhp.reshape(y_bsmhp.shape)).to(y_bsmhp.dtype)
    return y_bsmhp, shard.add(ssm_bhpr, decay_bh[..., None, None] * incoming_bhpr)


def _full_precision(x: Tensor) -> Any:
    kind = x.device.type
    if torch.amp.is_autocast_available(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
