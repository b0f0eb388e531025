"""Muon: momentum whose singular values are brought to about one before it moves a matrix.

    m = mu m + (1 - mu) g;  u = (1 - mu) g + mu m                    Nesterov's momentum
    X = u / max(|u|, 1e-7);  five times: A = X X^T, X = a X + (b A + c A A) X
    w = w (1 - lr decay) - 0.2 lr sqrt(max(rows, columns)) X         the size of an AdamW step

`torch.optim.Muon` does this with bfloat16 products, which is right where the device has them. A
processor without them emulates: measured with AVX2 and one thread, a product of (256, 256) and
(256, 768) took 160 ms in bfloat16 and 1.6 ms in float32. There, and beside a torch that has no Muon
(it came with 2.9), `Float32Muon` does the same in float32.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from anymamba.errors import ShapeError

__all__ = ["Float32Muon", "build_muon", "orthogonalise", "torch_muon_serves"]

MOMENTUM = 0.95
# A quintic that is steep at zero: five rounds bring singular values from 0.01..1 to 0.6..1.3.
COEFFICIENTS = (3.4445, -4.775, 2.0315)
ROUNDS = 5
SMALLEST_NORM = 1e-7


def orthogonalise(update_vi: Tensor) -> Tensor:
    """Return a matrix with the same singular vectors and singular values of about one.

    Args:
        update_vi: any matrix; the products run in float32, or float64 if it is float64.

    Returns:
        The result, in the dtype of the products.

    Example:
        >>> values = torch.linalg.svdvals(orthogonalise(torch.diag(torch.tensor([9.0, 1.0]))))
        >>> bool(((values > 0.6) & (values < 1.3)).all())
        True
    """
    a, b, c = COEFFICIENTS
    compute = torch.float64 if update_vi.dtype == torch.float64 else torch.float32
    is_tall = update_vi.shape[0] > update_vi.shape[1]
    # The Gram matrix belongs to the shorter side, and is the smaller one then.
    x = (update_vi.T if is_tall else update_vi).to(compute)
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ROUNDS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class Float32Muon(torch.optim.Optimizer):
    """Muon with products in float32; state and settings are those of `torch.optim.Muon`.

    Args:
        params: matrices, or groups of them.
        lr: learning rate, on the scale of AdamW's.
        weight_decay: decoupled decay.

    Raises:
        ShapeError: a parameter is no matrix.

    Example:
        >>> weight = torch.nn.Parameter(torch.eye(2))
        >>> weight.grad = torch.eye(2)
        >>> Float32Muon([weight], lr=0.1).step()
        >>> bool(weight[0, 0] < 1)
        True
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        """Take the matrices; nothing is allocated yet."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.dim() != 2:
                    raise ShapeError(
                        f"Float32Muon: parameters must be matrices; got shape "
                        f"{tuple(weight.shape)}. Give it to AdamW."
                    )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            lr, decay = group["lr"], group["weight_decay"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                momentum = state["momentum_buffer"].lerp_(weight.grad, 1 - MOMENTUM)
                update = orthogonalise(weight.grad.lerp(momentum, MOMENTUM))
                reach = 0.2 * lr * math.sqrt(max(weight.shape))
                weight.mul_(1 - lr * decay).add_(update, alpha=-reach)


def torch_muon_serves(device: torch.device) -> bool:
    """Say whether `torch.optim.Muon` is there and the device multiplies bfloat16 at full speed.

    Args:
        device: where the matrices are.

    Example:
        >>> torch_muon_serves(torch.device("mps"))
        False
    """
    if not hasattr(torch.optim, "Muon"):
        return False
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def build_muon(groups: list[dict[str, Any]], device: torch.device) -> torch.optim.Optimizer:
    """Return torch's own Muon where it can serve, else `Float32Muon`.

    Args:
        groups: parameter groups with "params", "lr" and "weight_decay".
        device: where the matrices are.
    """
    if not torch_muon_serves(device):
        return Float32Muon(groups)
    return torch.optim.Muon(
        groups,
        momentum=MOMENTUM,
        nesterov=True,
        ns_coefficients=COEFFICIENTS,
        eps=SMALLEST_NORM,
        ns_steps=ROUNDS,
        adjust_lr_fn="match_rms_adamw",
    )
