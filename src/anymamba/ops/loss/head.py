"""The loss of a head, piece by piece, with its gradients computed beside it (README 3).

The gradient of a mean of losses is known up to one factor when the loss is: what arrives from above
is a single number. So each piece of logits is computed once, turned into its gradient in place, and
multiplied out; the backward only scales. Three matrix products instead of the four of a recompute.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anymamba.ops.boundary import refuse_forward_mode
from anymamba.ops.loss import native, portable
from anymamba.ops.numerics import accumulate_dtype, full_precision

__all__ = ["HeadLoss", "checkpointed_loss", "composite_loss", "sum_of_losses"]

Fused = Callable[[Tensor, Tensor], Tensor]


def sum_of_losses(
    hidden_sd: Tensor, weight_wd: Tensor, targets_s: Tensor, rows: int, kernel: str
) -> Tensor:
    """Return the sum of the losses, and keep nothing."""
    run = portable.forward if kernel == "portable" else native.forward
    total = hidden_sd.new_zeros((), dtype=accumulate_dtype(hidden_sd.dtype))
    buffer_sw = _buffer(hidden_sd, weight_wd, rows)
    with full_precision(hidden_sd):
        for start in range(0, hidden_sd.shape[0], rows):
            piece_sd = hidden_sd[start : start + rows]
            logits_sw = torch.mm(piece_sd, weight_wd.T, out=buffer_sw[: piece_sd.shape[0]])
            total += run(logits_sw, targets_s[start : start + rows])[0].sum()
    return total


def _buffer(hidden_sd: Tensor, weight_wd: Tensor, rows: int) -> Tensor:
    # One for all pieces: fresh pages would cost as much as the softmax.
    return hidden_sd.new_empty(min(rows, hidden_sd.shape[0]), weight_wd.shape[0])


def checkpointed_loss(hidden_sd: Tensor, weight_wd: Tensor, targets_s: Tensor, rows: int) -> Tensor:
    """Return the sum from differentiable functions, each piece recomputed in the backward."""
    transformed = torch._C._are_functorch_transforms_active()
    total = hidden_sd.new_zeros((), dtype=accumulate_dtype(hidden_sd.dtype))
    for start in range(0, hidden_sd.shape[0], rows):
        piece = hidden_sd[start : start + rows], weight_wd, targets_s[start : start + rows]
        # A transform has no graph to hang a checkpoint on.
        if transformed:
            total = total + composite_loss(*piece)
        else:
            total = total + checkpoint(composite_loss, *piece, use_reentrant=False)
    return total


def composite_loss(hidden_sd: Tensor, weight_wd: Tensor, targets_s: Tensor) -> Tensor:
    """Return the sum of the losses of all rows at once, from differentiable functions."""
    return portable.composite(F.linear(hidden_sd, weight_wd), targets_s)[0].sum()


class HeadLoss(torch.autograd.Function):
    """The sum of the losses; the gradients wait for their factor."""

    @staticmethod
    def forward(
        ctx: Any, hidden_sd: Tensor, weight_wd: Tensor, targets_s: Tensor, rows: int, kernel: str
    ) -> Tensor:
        """Compute losses and gradients of each piece while its logits are there."""
        fused = (portable if kernel == "portable" else native).loss_and_gradient_
        with full_precision(hidden_sd):
            total, *grads = _with_gradients(
                hidden_sd, weight_wd, targets_s, rows, fused, ctx.needs_input_grad
            )
        # Not saved tensors: the first backward scales them in place, and nobody else may see it.
        ctx.grads, ctx.rows = grads, rows
        ctx.save_for_backward(hidden_sd, weight_wd, targets_s)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Scale the gradients; a second derivative, or a second backward, computes them anew."""
        hidden_sd, weight_wd, targets_s = ctx.saved_tensors
        grads, ctx.grads = ctx.grads, None
        if torch.is_grad_enabled() or grads is None:
            grads = _again(grad, hidden_sd, weight_wd, targets_s, ctx.rows, ctx.needs_input_grad)
        else:
            for one in grads:
                if one is not None:
                    one.mul_(grad)
        return (*grads, None, None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        """Refuse: the gradients were computed on the way, tangents were not."""
        refuse_forward_mode("head_cross_entropy")


def _with_gradients(
    hidden_sd: Tensor,
    weight_wd: Tensor,
    targets_s: Tensor,
    rows: int,
    fused: Fused,
    needs: tuple[bool, ...],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    compute = accumulate_dtype(hidden_sd.dtype)
    total = hidden_sd.new_zeros((), dtype=compute)
    grad_hidden_sd = hidden_sd.new_empty(hidden_sd.shape) if needs[0] else None
    grad_weight_wd = torch.empty_like(weight_wd, dtype=compute) if needs[1] else None
    if grad_weight_wd is not None and hidden_sd.shape[0] == 0:
        grad_weight_wd.zero_()
    buffer_sw = _buffer(hidden_sd, weight_wd, rows)
    for start in range(0, hidden_sd.shape[0], rows):
        piece_sd = hidden_sd[start : start + rows]
        logits_sw = torch.mm(piece_sd, weight_wd.T, out=buffer_sw[: piece_sd.shape[0]])
        total += fused(logits_sw, targets_s[start : start + rows]).sum()
        if grad_hidden_sd is not None:
            torch.mm(logits_sw, weight_wd, out=grad_hidden_sd[start : start + rows])
        if grad_weight_wd is None:
            continue
        # The first piece writes: clearing as many numbers as the weight has is up to 5% of a step.
        is_first = start == 0
        if compute == logits_sw.dtype:
            grad_weight_wd.addmm_(logits_sw.T, piece_sd, beta=0 if is_first else 1)
        elif is_first:
            grad_weight_wd.copy_(logits_sw.T @ piece_sd)
        else:
            grad_weight_wd += logits_sw.T @ piece_sd
    if grad_weight_wd is not None:
        grad_weight_wd = grad_weight_wd.to(weight_wd.dtype)
    return total, grad_hidden_sd, grad_weight_wd


def _again(
    grad: Tensor,
    hidden_sd: Tensor,
    weight_wd: Tensor,
    targets_s: Tensor,
    rows: int,
    needs: tuple[bool, ...],
) -> list[Tensor | None]:
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), full_precision(hidden_sd):
        wanted = [t for t, needed in zip((hidden_sd, weight_wd), needs[:2], strict=True) if needed]
        loss = checkpointed_loss(hidden_sd, weight_wd, targets_s, rows)
        found = iter(torch.autograd.grad(loss, wanted, grad, create_graph=create_graph))
    return [next(found) if needed else None for needed in needs[:2]]
