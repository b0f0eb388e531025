"""Checks of the token ids that models are given, and of how a token is run."""

import torch
from torch import Tensor

from anymamba.errors import CacheError, ConfigError, DtypeError, ShapeError

__all__ = ["check_ids", "check_known", "check_rows", "check_way"]


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


def check_known(where: str, ids_b: Tensor, entries: int) -> None:
    """Refuse ids that the embedding does not have.

    On the CPU, where torch would only say that an index is out of range; elsewhere, and where ids
    are symbols of a trace or a transform, looking at them would cost more than it tells.

    Args:
        where: who was called.
        ids_b: one id per row.
        entries: rows of the embedding.

    Raises:
        ConfigError: an id lies outside.
    """
    if type(ids_b) is not Tensor or ids_b.device.type != "cpu":
        return
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    ids = ids_b.tolist()
    if min(ids) < 0 or max(ids) >= entries:
        row, worst = next((r, i) for r, i in enumerate(ids) if not 0 <= i < entries)
        raise ConfigError(
            f"{where}: token ids must lie in 0..{entries - 1}; row {row} has {worst}. "
            "Use the tokenizer that belongs to the model."
        )


def check_rows(where: str, ids_b: Tensor, rows: int) -> None:
    """Refuse a state of another number of rows.

    Args:
        where: who was called.
        ids_b: one id per row.
        rows: of the state.

    Raises:
        CacheError: there must be one row per id.
    """
    if ids_b.shape[0] != rows:
        raise CacheError(
            f"{where}: the cache must have one row per token id; got {rows} rows and "
            f"{ids_b.shape[0]} ids. Pick rows with cache.rows([...])."
        )


def check_way(where: str, impl: str) -> None:
    """Refuse an `impl` with which no token can be run.

    Raises:
        ConfigError: it is none of the three.
    """
    if impl not in ("auto", "portable", "native"):
        raise ConfigError(f"{where}: impl must be 'auto', 'portable' or 'native'; got {impl!r}.")
