"""What several functions of this room share: questions, step sizes, gates, states in place."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.errors import BackendError, ConfigError, DtypeError, PackingError, ShapeError
from anymamba.ops import (
    RowSegments,
    accumulate_dtype,
    check_one_precision,
    segment_rows,
    softplus,
)

__all__ = [
    "check_index",
    "gate",
    "inference_only",
    "is_silu",
    "precision",
    "require",
    "segments_of",
    "step_sizes",
    "write_rows_",
]


def require(where: str, **tensors: Any) -> None:
    """Raise `DtypeError` unless every argument is a tensor; None is a mistake here too."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            given = type(tensor).__name__
            raise DtypeError(f"{where}: {name} must be a tensor; got {given}.")


def precision(where: str, **tensors: Tensor | None) -> torch.dtype:
    """Return the dtype to compute in; half types and float32 may mix, float64 stands alone."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    require(where, **given)
    return check_one_precision(where, **given)


def is_silu(where: str, activation: str | None) -> bool:
    """Return whether an activation's name means SiLU; None means the identity.

    Raises:
        ConfigError: the name is neither.
    """
    if activation not in (None, "silu", "swish"):
        raise ConfigError(
            f"{where}: activation must be None, 'silu' or 'swish'; got {activation!r}."
        )
    return activation is not None


def step_sizes(dt: Tensor, bias: Tensor | None, use_softplus: bool, dtype: torch.dtype) -> Tensor:
    """Add the bias and apply softplus, both in `dtype`; the bias spans the last axes."""
    dt = dt.to(dtype)
    if bias is not None:
        dt = dt + bias.to(dtype)
    return softplus(dt) if use_softplus else dt


def gate(y: Tensor, z: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply by silu(z), if there is a z, in full precision; return `dtype`."""
    if z is not None:
        compute = accumulate_dtype(z.dtype)
        y = y.to(compute) * F.silu(z.to(compute))
    return y.to(dtype)


def segments_of(where: str, seq_idx: Tensor, batch: int, length: int) -> RowSegments:
    """Turn the labels of a batch into borders, after checking their shape."""
    require(where, seq_idx=seq_idx)
    if tuple(seq_idx.shape) != (batch, length):
        raise PackingError(
            f"{where}: seq_idx must have shape {(batch, length)} (batch, sequence length); "
            f"got {tuple(seq_idx.shape)}."
        )
    return segment_rows(where, seq_idx)


def check_index(where: str, name: str, index_b: Tensor, batch: int, device: torch.device) -> Tensor:
    """Check one integer per batch row; return it as int64 on `device`."""
    require(where, **{name: index_b})
    if index_b.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{where}: {name} must be int32 or int64; got {index_b.dtype}.")
    if tuple(index_b.shape) != (batch,):
        raise ShapeError(
            f"{where}: {name} must have one entry per batch row, shape {(batch,)}; "
            f"got {tuple(index_b.shape)}."
        )
    return index_b.to(device=device, dtype=torch.int64)


def write_rows_(pool: Tensor, index_b: Tensor | None, old: Tensor, new: Tensor) -> None:
    """Write row i of `new` to row `index_b[i]` of `pool`; a negative index writes nothing.

    Args:
        pool: the states; changed in place.
        index_b: where each row goes; None means row i goes to row i.
        old: what the rows held, with row 0 of the pool in the place of negative indices.
        new: what they shall hold.
    """
    if index_b is None:
        pool.copy_(new)
        return
    real_b = (index_b >= 0).view(-1, *[1] * (new.dim() - 1))
    # Writing needs a place for every row, without asking the device which rows are real: padding
    # repeats the write of the first real row, or rewrites row 0 as it is when there is none.
    first = (index_b >= 0).to(torch.int8).argmax().view(1)
    new = torch.where(real_b, new.to(pool.dtype), old.to(pool.dtype))
    new = torch.where(real_b, new, new.index_select(0, first))
    safe_b = index_b.clamp(min=0)
    goal_b = torch.where(index_b >= 0, safe_b, safe_b.index_select(0, first))
    pool.index_copy_(0, goal_b, new)


def inference_only(where: str, y: Tensor, *inputs: Tensor | None) -> Tensor:
    """Return `y` so that a backward through it raises instead of passing the inputs over."""
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    if not wanted or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return y
    return _InferenceOnly.apply(where, y, *wanted)  # pyright: ignore[reportReturnType]


class _InferenceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, where: str, y: Tensor, *inputs: Tensor) -> Tensor:
        ctx.where = where
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise BackendError(
            f"{ctx.where}: states are updated in place, so this call has no backward; a gradient "
            "arrived. Use the step functions of anymamba.ops, or decode under torch.no_grad()."
        )
