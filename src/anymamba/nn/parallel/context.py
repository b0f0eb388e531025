"""Context parallelism: a sequence on several ranks, each with its tokens, states passed on.

What a block does with its part of the tokens is in `context_blocks.py`; here a model is taken over,
and packed rows are cut into the segments that each rank runs.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from anymamba.errors import BackendError, ConfigError
from anymamba.nn.attention import MHA
from anymamba.nn.bidirectional import BidirectionalStack
from anymamba.nn.block import Block
from anymamba.nn.parallel.context_blocks import WHERE, run_of
from anymamba.nn.parallel.ring import Ring
from anymamba.nn.parallel.shard import dense_shard, packed_shard, reject_packed_cache
from anymamba.nn.registers import Registers
from anymamba.nn.stack import Stack, StackStep
from anymamba.ops import SsdPath, guard

__all__ = ["context_parallel"]


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
        self.run = run_of(block)

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
