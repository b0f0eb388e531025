"""The loss of a head, piece by piece, with its gradients computed beside it (README 3).

The gradient of a mean of losses is known up to one factor when the loss is: what arrives from above
is a single number. So each piece of logits is computed once, turned into its gradient in place, and
multiplied out; the backward only scales. Three matrix products instead of the four of a recompute.

The products run in the dtype of the hidden states. A float32 weight beside narrower ones (autocast)
is narrowed once, and its gradient is widened panel by panel while it is in the caches: each cast of
a whole weight reads and writes as much as a product of 256 rows takes time for.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anymamba.ops.boundary import refuse_forward_mode
from anymamba.ops.loss import native, portable
from anymamba.ops.native import new_tensor
from anymamba.ops.numerics import accumulate_dtype, full_precision

__all__ = ["HeadLoss", "checkpointed_loss", "composite_loss", "sum_of_losses"]

Fused = Callable[[Tensor, Tensor], Tensor]

# Rows of a panel of the weight's gradient: its product and its sum stay in the caches together.
_PANEL_ROWS = 2048


def sum_of_losses(
    hidden_sd: Tensor, weight_wd: Tensor, targets_s: Tensor, rows: int, kernel: str
) -> Tensor:
    """Return the sum of the losses, and keep nothing."""
    run = portable.forward if kernel == "portable" else native.forward
    total = hidden_sd.new_zeros((), dtype=accumulate_dtype(hidden_sd.dtype))
    buffer_sw = _buffer(hidden_sd, weight_wd, rows)
    weight_wd = _as_narrow(weight_wd, hidden_sd.dtype)
    with full_precision(hidden_sd):
        for start in range(0, hidden_sd.shape[0], rows):
            piece_sd = hidden_sd[start : start + rows]
            logits_sw = torch.mm(piece_sd, weight_wd.T, out=buffer_sw[: piece_sd.shape[0]])
            total += run(logits_sw, targets_s[start : start + rows])[0].sum()
    return total


def _buffer(hidden_sd: Tensor, weight_wd: Tensor, rows: int) -> Tensor:
    # One for all pieces: fresh pages would cost as much as the softmax.
    return new_tensor(hidden_sd, (min(rows, hidden_sd.shape[0]), weight_wd.shape[0]))


def _as_narrow(weight_wd: Tensor, dtype: torch.dtype) -> Tensor:
    if weight_wd.dtype == dtype:
        return weight_wd
    return new_tensor(weight_wd, weight_wd.shape, dtype).copy_(weight_wd)


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
    logits_sw = F.linear(hidden_sd, weight_wd.to(hidden_sd.dtype))
    return portable.composite(logits_sw, targets_s)[0].sum()


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
    grad_weight_wd = new_tensor(weight_wd, weight_wd.shape, compute) if needs[1] else None
    if grad_weight_wd is not None and hidden_sd.shape[0] == 0:
        grad_weight_wd.zero_()
    buffer_sw = _buffer(hidden_sd, weight_wd, rows)
    narrow_wd = _as_narrow(weight_wd, hidden_sd.dtype)
    for start in range(0, hidden_sd.shape[0], rows):
        piece_sd = hidden_sd[start : start + rows]
        logits_sw = torch.mm(piece_sd, narrow_wd.T, out=buffer_sw[: piece_sd.shape[0]])
        total += fused(logits_sw, targets_s[start : start + rows]).sum()
        if grad_hidden_sd is not None:
            torch.mm(logits_sw, narrow_wd, out=grad_hidden_sd[start : start + rows])
        if grad_weight_wd is not None:
            _add_product(grad_weight_wd, logits_sw, piece_sd, is_first=start == 0)
    if grad_weight_wd is not None:
        grad_weight_wd = grad_weight_wd.to(weight_wd.dtype)
    return total, grad_hidden_sd, grad_weight_wd


def _add_product(
    grad_weight_wd: Tensor, grad_sw: Tensor, piece_sd: Tensor, *, is_first: bool
) -> None:
    """Add what a piece gives to the weight.

    The first piece writes: clearing as many numbers as the weight has is up to 5% of a step.
    """
    if grad_weight_wd.dtype == grad_sw.dtype:
        grad_weight_wd.addmm_(grad_sw.T, piece_sd, beta=0 if is_first else 1)
        return
    buffer_wd = grad_sw.new_empty(_PANEL_ROWS, piece_sd.shape[1])
    for start in range(0, grad_weight_wd.shape[0], _PANEL_ROWS):
        target_wd = grad_weight_wd[start : start + _PANEL_ROWS]
        panel_sw = grad_sw[:, start : start + _PANEL_ROWS]
        panel_wd = torch.mm(panel_sw.T, piece_sd, out=buffer_wd[: target_wd.shape[0]])
        if is_first:
            target_wd.copy_(panel_wd)
        else:
            target_wd += panel_wd


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
        # As views: hidden states may depend on the weight, and that path is not asked for here.
        hidden_sd, weight_wd = hidden_sd.view_as(hidden_sd), weight_wd.view_as(weight_wd)
        wanted = [t for t, needed in zip((hidden_sd, weight_wd), needs[:2], strict=True) if needed]
        loss = checkpointed_loss(hidden_sd, weight_wd, targets_s, rows)
        found = iter(torch.autograd.grad(loss, wanted, grad, create_graph=create_graph))
    return [next(found) if needed else None for needed in needs[:2]]
