"""Next-token loss over a large vocabulary without ever holding all logits."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["head_loss", "next_token_targets"]

IGNORE = -100
# Logits alive at a time: 64 MB of float32.
PIECE_ELEMENTS = 2**24


def next_token_targets(
    ids_bs: Tensor, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None
) -> Tensor:
    """Return the token each position predicts; the last one of a sequence predicts nothing.

    Example:
        >>> next_token_targets(torch.tensor([[5, 6, 7]]))
        tensor([[   6,    7, -100]])
    """
    targets_bs = torch.full_like(ids_bs, IGNORE)
    targets_bs[:, :-1] = ids_bs[:, 1:]
    if seq_idx is not None:
        ends_bs = seq_idx[:, 1:] != seq_idx[:, :-1]
        targets_bs[:, :-1] = targets_bs[:, :-1].masked_fill(ends_bs, IGNORE)
    if cu_seqlens is not None:
        last_q = (cu_seqlens[1:].to(ids_bs.device, torch.int64) - 1).clamp(min=0)
        targets_bs = targets_bs.index_fill(1, last_q, IGNORE)
    return targets_bs


def head_loss(hidden_bsd: Tensor, weight_wd: Tensor, targets_bs: Tensor) -> Tensor:
    """Return the mean cross-entropy of `hidden @ weight^T`, piece by piece.

    Each piece's logits are recomputed in the backward, so the largest tensor is one piece of them.
    Targets of -100 do not count.

    Args:
        hidden_bsd: normalised hidden states.
        weight_wd: the head's weight, one row per token.
        targets_bs: the token each position predicts.
    """
    hidden_sd, targets_s = hidden_bsd.flatten(0, 1), targets_bs.flatten()
    rows = max(16, PIECE_ELEMENTS // weight_wd.shape[0])
    total = hidden_sd.new_zeros((), dtype=torch.promote_types(hidden_sd.dtype, torch.float32))
    for start in range(0, hidden_sd.shape[0], rows):
        piece = hidden_sd[start : start + rows], weight_wd, targets_s[start : start + rows]
        total = total + checkpoint(_piece_loss, *piece, use_reentrant=False)
    return total / (targets_s != IGNORE).sum().clamp(min=1)


def _piece_loss(hidden_sd: Tensor, weight_wd: Tensor, targets_s: Tensor) -> Tensor:
    logits_sw = F.linear(hidden_sd, weight_wd)
    wide = torch.promote_types(logits_sw.dtype, torch.float32)
    return F.cross_entropy(logits_sw.to(wide), targets_s, ignore_index=IGNORE, reduction="sum")
