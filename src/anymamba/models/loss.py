"""Cross-entropy of models: sums that add up over parts, and their mean."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.nn import is_plain
from anymamba.ops import IGNORE, head_cross_entropy, tied_embedding

__all__ = ["embed", "head_loss_sum", "logits_loss_sum", "mean_loss", "next_token_targets"]


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
        # An empty sequence at the front has no last token: -1 becomes that of the row, which
        # predicts nothing anyway.
        last_q = (cu_seqlens[1:].to(ids_bs.device, torch.int64) - 1) % ids_bs.shape[1]
        targets_bs = targets_bs.index_fill(1, last_q, IGNORE)
    return targets_bs


def embed(embedding: nn.Module, head: nn.Module, ids_bs: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the looked-up rows, and the weight for `head_loss_sum` if embedding and head share it.

    None where the head has a weight of its own, or either is not a plain module and must be called.
    """
    if not (is_plain(embedding, nn.Embedding) and is_plain(head, nn.Linear)):
        return embedding(ids_bs), None
    is_shared = embedding.weight is head.weight and head.bias is None
    options = (embedding.padding_idx, embedding.max_norm)
    is_usual = options == (None, None) and not (embedding.scale_grad_by_freq or embedding.sparse)
    if not (is_shared and is_usual and isinstance(embedding.weight, Tensor)):
        return embedding(ids_bs), None
    return tied_embedding(ids_bs, embedding.weight)


def head_loss_sum(hidden_bsd: Tensor, weight_wd: Tensor, targets_bs: Tensor) -> Tensor:
    """Return the summed cross-entropy of `hidden @ weight^T`, piece by piece.

    The largest tensor is one piece of logits, which becomes its own gradient in place. Targets of
    -100 do not count.

    Args:
        hidden_bsd: normalised hidden states.
        weight_wd: the head's weight, one row per token.
        targets_bs: the token each position predicts.
    """
    targets_s = targets_bs.flatten().to(torch.int64)
    return head_cross_entropy(hidden_bsd.flatten(0, 1), weight_wd, targets_s)


def logits_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy of logits that exist already; float32 for half types."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    targets = targets.flatten().to(torch.int64)
    return F.cross_entropy(wide, targets, ignore_index=IGNORE, reduction="sum")


def mean_loss(total: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over the targets that count; 0 where none does.

    Example:
        >>> mean_loss(torch.tensor(6.0), torch.tensor([3, 1, -100]))
        tensor(3.)
    """
    return total / (targets != IGNORE).sum().clamp(min=1)
