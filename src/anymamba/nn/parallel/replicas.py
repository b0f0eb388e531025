"""Replicas of a model whose heads are split: their gradients, averaged after each backward.

torch's `DistributedDataParallel` takes plain parameters only, and split ones are distributed.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["average_gradients"]


def average_gradients(model: nn.Module, group: "dist.ProcessGroup") -> None:
    """Make every backward through a model end with the mean of its gradients over a group.

    All of them travel in one message per dtype, when the last one is there. Gradients that add up
    over several backwards stay right: the mean of what was averaged before is itself.

    Args:
        model: the same on every rank of the group, plain parameters or distributed ones.
        group: ranks that hold the same parameters, or the same parts of them.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    average = _Average(trained, group)
    # A backward that broke off has left its mark; the next one begins anew.
    model.register_forward_pre_hook(lambda *_: average.forget())
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(average.after_backward)


class _Average:
    def __init__(self, trained: list[nn.Parameter], group: "dist.ProcessGroup") -> None:
        self.trained, self.group = trained, group
        self.is_queued = False

    def forget(self) -> None:
        self.is_queued = False

    def after_backward(self, parameter: nn.Parameter) -> None:
        if not self.is_queued:
            self.is_queued = True
            engine = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]
            engine.queue_callback(self.run)

    @torch.no_grad()
    def run(self) -> None:
        self.is_queued = False
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self.trained:
            if parameter.grad is None:
                # Another rank may have one, and the message must be as long as its.
                parameter.grad = torch.zeros_like(parameter)
            grad = _local(parameter.grad)
            by_dtype.setdefault(grad.dtype, []).append(grad)
        for grads in by_dtype.values():
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=self.group)
            flat /= dist.get_world_size(self.group)
            for grad, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(mean.view(grad.shape))


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
