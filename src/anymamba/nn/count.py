"""What a block costs, from its sizes alone: parameters, bytes of state, FLOP per token.

Nothing is run and nothing is allocated; a block on the meta device will do.
"""

from typing import Any

from torch import nn

from anymamba.errors import ConfigError
from anymamba.nn.block import Block
from anymamba.nn.mamba1 import Mamba
from anymamba.nn.mamba2 import Mamba2
from anymamba.nn.mamba3 import Mamba3

__all__ = ["count_parameters", "flops_per_token", "state_bytes"]

PROJECTIONS = ("in_proj", "x_proj", "dt_proj", "out_proj")


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters, trained or frozen; tied ones count once.

    Example:
        >>> count_parameters(nn.Linear(3, 2))
        8
    """
    return sum(parameter.numel() for parameter in module.parameters())


def state_bytes(block: Block[Any], batch_size: int = 1) -> int:
    """Return the bytes of the block's state; they do not grow with the sequence.

    Args:
        block: any block with a state of fixed size.
        batch_size: number of sequences.

    Example:
        >>> state_bytes(Mamba(d_model=8, d_state=4, d_conv=3))  # 4 bytes * 16 channels * (3 + 4)
        448
    """
    return block.empty_cache(batch_size, device="meta").nbytes  # pyright: ignore[reportAttributeAccessIssue]


def flops_per_token(
    block: Mamba | Mamba2 | Mamba3, *, training: bool = False, chunk_len: int = 64
) -> int:
    """Return the floating-point operations that one token of a long sequence costs.

        projections   2 * in * out each
        convolution   2 * k * channels
        Mamba-1 scan  9 * i * r            2 for exp(dt A), 2 for dt B x, 3 to combine, 2 for C h
        SSD           h * m * (M * (r + p) + 4 * p * r)       M = chunk_len = l * m
                      the triangle of C B^T and its product with the values: M * (r + p)
                      the chunk's own state 2 * p * r, and what the carried state adds 2 * p * r

    A multiplication, an addition and an exponential are one FLOP each. Not counted, because they
    touch each activation or state a few times only: norms, gates, activations, biases, the skip,
    rotations, the MIMO weights, the carry between chunks. Mamba-3 counts one pass on either
    pathway, so that the figure is the work that cannot be avoided.

    Args:
        block: one of the three families.
        training: count forward and backward: three times the forward.
        chunk_len: positions of a chunk, rank included; the convention is 64, whatever chunk the
            code uses.

    Raises:
        ConfigError: `block` is of another kind, or `chunk_len` is not positive.

    Example:
        >>> flops_per_token(Mamba(d_model=768))
        7704576
    """
    if not isinstance(block, Mamba | Mamba2 | Mamba3):
        raise ConfigError(
            f"flops_per_token: the block must be a Mamba, Mamba2 or Mamba3; "
            f"got {type(block).__name__}. Count the blocks of a stack one by one."
        )
    if chunk_len < 1:
        raise ConfigError(f"flops_per_token: chunk_len must be positive; got {chunk_len}.")
    total = _projections(block) + _convolution(block)
    if isinstance(block, Mamba):
        total += 9 * block.d_inner * block.d_state
    else:
        rank = block.mimo_rank if isinstance(block, Mamba3) else 1
        p, r = block.headdim, block.d_state
        total += block.nheads * rank * (chunk_len * (r + p) + 4 * p * r)
    return 3 * total if training else total


def _projections(block: nn.Module) -> int:
    # By name, not by type: a quantised or wrapped projection still has the two sizes.
    found = [getattr(block, name) for name in PROJECTIONS if hasattr(block, name)]
    return sum(2 * linear.in_features * linear.out_features for linear in found)


def _convolution(block: Mamba | Mamba2 | Mamba3) -> int:
    if isinstance(block, Mamba3):
        return 0
    return 2 * block.d_conv * (block.d_inner if isinstance(block, Mamba) else block.conv_dim)
