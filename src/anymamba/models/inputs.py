"""Checks of the token ids that models are given, and of how a token is run."""

import torch
from torch import Tensor

from anymamba.errors import ConfigError, DtypeError, ShapeError

__all__ = ["check_ids", "check_way"]


def check_ids(where: str, ids: Tensor, rank: int) -> None:
    """Refuse what is not a tensor of token ids with one axis, or with two.

    Raises:
        DtypeError: not integers.
        ShapeError: other axes, or none in one of them.
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
    """Refuse an `impl` that is none of a token.

    Raises:
        ConfigError: it is not.
    """
    if impl not in ("auto", "portable", "native"):
        raise ConfigError(f"{where}: impl must be 'auto', 'portable' or 'native'; got {impl!r}.")
