"""Reading sequences backwards: whole, padded to a common length, or packed into one row.

A reversal is its own inverse, so one index serves the way there and the way back. Padding stays
behind the tokens in both directions: what is causal never sees it.
"""

import torch
from torch import Tensor

from anymamba.errors import DtypeError, PackingError, ShapeError

__all__ = ["check_lengths", "reversal_index", "reverse", "token_mask"]


def reversal_index(
    batch: int,
    length: int,
    device: torch.device,
    *,
    lengths_b: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor | None:
    """Return where each place of a reversed batch is read from; None means all rows are whole.

    Args:
        batch: rows.
        length: places of a row.
        device: of the result.
        lengths_b: tokens of each row; the places behind them are padding and stay.
        cu_seqlens: borders of packed sequences; each is reversed within its borders.

    Example:
        >>> reversal_index(2, 4, torch.device("cpu"), lengths_b=torch.tensor([3, 4]))
        tensor([[2, 1, 0, 3],
                [3, 2, 1, 0]])
    """
    if lengths_b is None and cu_seqlens is None:
        return None
    place_1s = torch.arange(length, device=device)[None]
    if cu_seqlens is not None:
        borders = cu_seqlens.to(device=device, dtype=torch.int64)
        after_1s = torch.searchsorted(borders, place_1s, right=True)
        return borders[after_1s - 1] + borders[after_1s] - 1 - place_1s
    assert lengths_b is not None
    backwards_bs = lengths_b.to(device=device, dtype=torch.int64)[:, None] - 1 - place_1s
    return torch.where(backwards_bs < 0, place_1s.expand(batch, -1), backwards_bs)


def reverse(x_bsd: Tensor, index_bs: Tensor | None) -> Tensor:
    """Read every row backwards, by the index of `reversal_index`.

    Example:
        >>> reverse(torch.tensor([[[1.0], [2.0], [3.0]]]), None).flatten()
        tensor([3., 2., 1.])
    """
    if index_bs is None:
        return x_bsd.flip(1)
    if x_bsd.shape[0] == 1:
        return x_bsd.index_select(1, index_bs[0])
    return x_bsd.gather(1, index_bs[..., None].expand_as(x_bsd))


def check_lengths(where: str, lengths_b: Tensor, batch: int, length: int) -> None:
    """Raise unless `lengths_b` says how many tokens of each row are real.

    Raises:
        DtypeError: not an integer tensor.
        ShapeError: not one number per row.
        PackingError: a row is empty or longer than the batch.
    """
    if not isinstance(lengths_b, Tensor) or lengths_b.dtype not in (torch.int32, torch.int64):
        given = lengths_b.dtype if isinstance(lengths_b, Tensor) else type(lengths_b).__name__
        raise DtypeError(f"{where}: lengths must be an int32 or int64 tensor; got {given}.")
    if tuple(lengths_b.shape) != (batch,):
        raise ShapeError(
            f"{where}: lengths must have one number per row, shape ({batch},); "
            f"got shape {tuple(lengths_b.shape)}."
        )
    if torch.compiler.is_compiling():
        return
    shortest, longest = (int(x) for x in torch.aminmax(lengths_b))
    if shortest < 1 or longest > length:
        raise PackingError(
            f"{where}: lengths must lie in 1..{length}; they go from {shortest} to {longest}. "
            "Leave empty rows out of the batch."
        )


def token_mask(lengths_b: Tensor | None, like: Tensor) -> Tensor:
    """Return True at tokens and False at padding, (batch, sequence).

    Args:
        lengths_b: tokens of each row; None means that all are.
        like: (batch, sequence, ...); its device is used.

    Example:
        >>> token_mask(torch.tensor([1, 3]), torch.zeros(2, 3, 8)).int()
        tensor([[1, 0, 0],
                [1, 1, 1]], dtype=torch.int32)
    """
    batch, length = like.shape[:2]
    if lengths_b is None:
        return torch.ones(batch, length, dtype=torch.bool, device=like.device)
    return torch.arange(length, device=like.device)[None] < lengths_b.to(like.device)[:, None]
