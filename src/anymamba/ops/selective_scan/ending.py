"""Skip and gate inside a chunk: the way from `sum_r C h` to the output, and its adjoint.

    out = (sum_r C h + skip u) silu(z)

Everything is laid out as in `chunked.py`. A skip or gate without channels is none: the operator's
tensors are always there, and an empty one costs nothing and has an empty gradient.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Ending"]


class Ending:
    """The skip and gate of one call; in the backward it gathers their gradients."""

    def __init__(
        self,
        skip_i: Tensor,
        z_bsi: Tensor,
        grad_z_bsi: Tensor,
        u_sbg1e: Tensor,
        compute: torch.dtype,
        time_major: Callable[[Tensor], Tensor],
    ) -> None:
        """Lay the two out in chunks."""
        self.compute, self.u_sbg1e, self.grad_z_bsi = compute, u_sbg1e, grad_z_bsi
        self.skip_i = skip_i
        self.skip_g1e = self.z_sbg1e = self.grad_z_sbg1e = None
        groups = u_sbg1e.shape[2]
        if skip_i.numel():
            self.skip_g1e = skip_i.to(compute).unflatten(0, (groups, 1, -1))
            self.grad_skip_g1e = torch.zeros_like(self.skip_g1e)
        if z_bsi.numel():
            self.z_sbg1e, self.grad_z_sbg1e = time_major(z_bsi), time_major(grad_z_bsi)

    def apply(self, chunk: slice, sum_lbg1e: Tensor) -> Tensor:
        """Return the outputs of a chunk."""
        y_lbg1e = self._skipped(chunk, sum_lbg1e)
        if self.z_sbg1e is None:
            return y_lbg1e
        return y_lbg1e * F.silu(self.z_sbg1e[chunk].to(self.compute))

    def take_back(
        self, chunk: slice, grad_lbg1e: Tensor, recompute_sum: Callable[[], Tensor]
    ) -> Tensor:
        """Turn the gradient of the outputs into that of the sum; keep what skip and gate receive.

        Args:
            chunk: the tokens.
            grad_lbg1e: gradient of the outputs.
            recompute_sum: returns `sum_r C h`, which only a gate asks for.
        """
        if self.z_sbg1e is not None and self.grad_z_sbg1e is not None:
            z_lbg1e = self.z_sbg1e[chunk].to(self.compute)
            before_lbg1e = self._skipped(chunk, recompute_sum())
            self.grad_z_sbg1e[chunk] = torch.ops.aten.silu_backward(
                grad_lbg1e * before_lbg1e, z_lbg1e
            )
            grad_lbg1e = grad_lbg1e * F.silu(z_lbg1e)
        if self.skip_g1e is not None:
            self.grad_skip_g1e += (grad_lbg1e * self._u(chunk)).sum((0, 1))
        return grad_lbg1e

    def add_skip(self, grad_u_lbg1e: Tensor, grad_lbg1e: Tensor) -> Tensor:
        """Add what u receives through the skip."""
        if self.skip_g1e is None:
            return grad_u_lbg1e
        return grad_u_lbg1e.addcmul_(self.skip_g1e, grad_lbg1e)

    def grad_skip(self) -> Tensor:
        """Return the gradient of the skip, empty where there is none."""
        if self.skip_g1e is None:
            return torch.empty_like(self.skip_i)
        return self.grad_skip_g1e.flatten().to(self.skip_i.dtype)

    def _skipped(self, chunk: slice, sum_lbg1e: Tensor) -> Tensor:
        if self.skip_g1e is None:
            return sum_lbg1e
        return torch.addcmul(sum_lbg1e, self.skip_g1e, self._u(chunk))

    def _u(self, chunk: slice) -> Tensor:
        return self.u_sbg1e[chunk].to(self.compute)
