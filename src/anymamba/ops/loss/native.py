"""Cross-entropy of rows on the CPU kernel (README 6): the bodies of `portable`."""

import torch
from torch import Tensor

from anymamba.ops.loss.targets import check_entries
from anymamba.ops.native import check_storage, run_kernel

__all__ = ["backward", "forward", "loss_and_gradient_", "refusal"]


def refusal(logits_sw: Tensor) -> str | None:
    """Say why the kernel cannot serve these tensors; None when it can."""
    return check_storage(logits=logits_sw)


def forward(logits_sw: Tensor, targets_s: Tensor) -> tuple[Tensor]:
    """Return the loss of each row; 0 where it does not count."""
    # Here once more: a traced or mapped call had no values to look at, and the kernel would read
    # (and write) wherever a wrong target points.
    check_entries("cross_entropy_rows", targets_s, logits_sw.shape[1])
    return (_run(_by_rows(logits_sw), targets_s, None, None),)


def backward(grad_s: Tensor, logits_sw: Tensor, targets_s: Tensor) -> tuple[Tensor]:
    """Return the gradient of the logits."""
    grad_sw = logits_sw.new_empty(logits_sw.shape)
    _run(_by_rows(logits_sw), targets_s, grad_s, grad_sw)
    return (grad_sw,)


def loss_and_gradient_(logits_sw: Tensor, targets_s: Tensor) -> Tensor:
    """Return the loss of each row, and leave its gradient where the logits were."""
    return _run(logits_sw, targets_s, None, logits_sw)


def _run(
    logits_sw: Tensor, targets_s: Tensor, grad_s: Tensor | None, grad_sw: Tensor | None
) -> Tensor:
    losses_s = logits_sw.new_empty(logits_sw.shape[0], dtype=torch.float32)
    tensors = (logits_sw, targets_s.to(torch.int64), grad_s, losses_s, grad_sw)
    run_kernel("loss_rows", tensors, logits_sw.shape)
    return losses_s


def _by_rows(logits_sw: Tensor) -> Tensor:
    return logits_sw if logits_sw.stride(-1) == 1 else logits_sw.contiguous()
