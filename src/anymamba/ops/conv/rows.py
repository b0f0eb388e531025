"""Rows of tokens with the windows they follow, dense and packed (README 3)."""

from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.errors import ShapeError
from anymamba.ops.packing import Packing, packing

__all__ = ["ExtendedRow", "PackedSlots", "check_rows", "extend_row", "packed_slots"]


class ExtendedRow(NamedTuple):
    """Tokens in one row with the windows they follow, so that a plain filter serves all.

    The filter's output at slot `token_s[t]` belongs to token t; windows need no output.
    """

    row_bSv: Tensor
    token_s: Tensor
    window_bvk: Tensor  # the last k columns of each row or sequence


def extend_row(
    x_bsv: Tensor, window_bvk: Tensor, *, cu_seqlens: Tensor | None = None
) -> ExtendedRow:
    """Put windows in front of the tokens they precede: of each row, or of each packed sequence.

    The row has the wider dtype of the two, so that nothing is lost.

    Args:
        x_bsv: tokens, channels last.
        window_bvk: the k columns before each row; one per sequence when packed.
        cu_seqlens: borders of packed sequences; batch must be 1.

    Example:
        >>> x_bsv, window_bvk = torch.ones(1, 3, 1), torch.zeros(2, 1, 2)
        >>> extend_row(x_bsv, window_bvk, cu_seqlens=torch.tensor([0, 1, 3])).token_s
        tensor([2, 5, 6])
    """
    where = "extend_row"
    batch, length, _ = x_bsv.shape
    width = window_bvk.shape[2]
    if cu_seqlens is None:
        check_rows(where, window_bvk, batch, "batch")
        row_bSv = torch.cat([window_bvk.transpose(1, 2), x_bsv], 1)
        token_s = torch.arange(width, width + length, device=x_bsv.device)
        return ExtendedRow(row_bSv, token_s, _slide(window_bvk, x_bsv))
    pack = packing(where, cu_seqlens, batch, length, x_bsv.device)
    check_rows(where, window_bvk, pack.count, "sequence")
    slots = packed_slots(pack, width)
    rows_Sv = torch.cat([x_bsv[0], window_bvk.transpose(1, 2).flatten(0, 1)])
    order = torch.cat([slots.token_s, slots.opening_qk.flatten()])
    row_Sv = torch.zeros_like(rows_Sv).index_copy(0, order, rows_Sv)
    last_qkv = row_Sv.index_select(0, slots.closing_qk.flatten()).unflatten(0, (-1, width))
    last_qvk = last_qkv.transpose(1, 2).to(window_bvk.dtype).contiguous()
    return ExtendedRow(row_Sv[None], slots.token_s, last_qvk)


class PackedSlots(NamedTuple):
    """Where tokens and windows lie in the row that `extend_row` makes of a pack."""

    token_s: Tensor
    opening_qk: Tensor  # the window before each sequence
    closing_qk: Tensor  # the last k columns of each sequence, window included


def packed_slots(pack: Packing, width: int) -> PackedSlots:
    """Give every sequence `width` columns before its own."""
    device = pack.cu_seqlens.device
    token_s = torch.arange(pack.sequence_s.shape[0], device=device) + (pack.sequence_s + 1) * width
    column_qk = torch.arange(pack.count * width, device=device).view(pack.count, width)
    return PackedSlots(
        token_s, pack.cu_seqlens[:-1, None] + column_qk, pack.cu_seqlens[1:, None] + column_qk
    )


def check_rows(where: str, window_bvk: Tensor, rows: int, what: str) -> None:
    """Check that there is one window per batch row, or per packed sequence.

    Raises:
        ShapeError: there is not.
    """
    if window_bvk.shape[0] != rows:
        raise ShapeError(
            f"{where}: window_bvk must have one row per {what} ({rows}); "
            f"got shape {tuple(window_bvk.shape)}. Pass the window this {what} ended with."
        )


def _slide(window_bvk: Tensor, x_bsv: Tensor) -> Tensor:
    """Return the last k columns of [window | x]."""
    width = window_bvk.shape[2]
    newest_bvs = x_bsv[:, -width:].transpose(1, 2).to(window_bvk.dtype)
    return torch.cat([window_bvk, newest_bvs], 2)[:, :, -width:].contiguous()
