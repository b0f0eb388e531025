"""Checks of the token ids that models are given, and of how a token is run."""

import torch
from torch import Tensor

from anymamba.errors import ConfigError, DtypeError, ShapeError

__all__ = ["check_ids", "check_way"]


def check_ids(where: str, ids: Tensor, rank: int) -> None:
    """Refuse what is not a tensor of token ids.

    Args:
        where: who was called.
        ids: what was given.
        rank: how many axes it must have: 1, the batch, or 2, batch and sequence.

    Raises:
        DtypeError: not integers.
        ShapeError: other axes, or an empty one.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        given = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise DtypeError(f"{where}: token ids must be an int32 or int64 tensor; got {given}.")
    if ids.dim() != rank or ids.numel() == 0:
        axes = "(batch, sequence)" if rank == 2 else "(batch,)"
        raise ShapeError(
            f"{where}: token ids must have the axes {axes}, none empty; "
            f"got shape {tuple(ids.shape)}."
        )


def check_way(where: str, impl: str) -> None:
    """Refuse an `impl` with which no token can be run.

    Raises:
        ConfigError: it is none of the three.
    """
    if impl not in ("auto", "portable", "native"):
        raise ConfigError(f"{where}: impl must be 'auto', 'portable' or 'native'; got {impl!r}.")
