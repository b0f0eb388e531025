"""The two uses of a tied embedding, whose gradients meet without a tensor of zeros.

A weight that is both looked up and multiplied with has two gradients. torch clears one as large as
the weight for the rows that were looked up, fills it, and adds it to the other: 6 to 10% of a
training step of 256 tokens. Here the rows are added to the head's gradient, where they belong.
"""

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.ops.boundary import refuse_forward_mode
from anymamba.ops.half_linear import is_traced
from anymamba.ops.numerics import accumulate_dtype

__all__ = ["tied_embedding"]


def tied_embedding(ids_bs: Tensor, weight_wd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that were looked up, and the weight for the head.

    Both gradients arrive as one. Values are those of `torch.nn.functional.embedding`. The second
    result is for `head_cross_entropy` alone: what it sends back is added to in place, and another
    function might have shared it with somebody else.

    Args:
        ids_bs: token ids, any shape.
        weight_wd: one row per token.

    Example:
        >>> rows_bsd, weight_wd = tied_embedding(torch.tensor([[1]]), torch.eye(2))
        >>> rows_bsd
        tensor([[[0., 1.]]])
    """
    if is_traced() or type(weight_wd) not in (Tensor, torch.nn.Parameter):
        return F.embedding(ids_bs, weight_wd), weight_wd
    return _Tied.apply(ids_bs, weight_wd)  # pyright: ignore[reportReturnType]


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_bs: Tensor, weight_wd: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids_bs)
        ctx.rows = weight_wd.shape[0]
        ctx.set_materialize_grads(False)
        return F.embedding(ids_bs, weight_wd), weight_wd.view_as(weight_wd)

    @staticmethod
    def backward(ctx: Any, grad_bsd: Tensor | None, grad_wd: Tensor | None) -> Any:
        (ids_bs,) = ctx.saved_tensors
        if grad_bsd is None:
            return None, grad_wd
        # The head's gradient was made for this Function and is nobody else's, unless a graph of the
        # backward holds it. Sums in half types are not interleaved: a large one would swallow rows.
        if (
            grad_wd is not None
            and not torch.is_grad_enabled()
            and grad_wd.device.type == "cpu"
            and grad_wd.dtype == grad_bsd.dtype
            and accumulate_dtype(grad_wd.dtype) == grad_wd.dtype
        ):
            return None, grad_wd.index_add_(
                0, ids_bs.flatten(), grad_bsd.reshape(-1, grad_bsd.shape[-1])
            )
        dense_wd = torch.ops.aten.embedding_dense_backward(grad_bsd, ids_bs, ctx.rows, -1, False)
        return None, dense_wd if grad_wd is None else grad_wd + dense_wd

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode("tied_embedding")
