"""B and C inside a chunk: constant over time, or one row per token and group.

Both kinds offer the same three products. Everything is laid out as in `chunked.py`:
(l, b, g, r, e), where x has no state axis and z has one.

    spread         out[l, b, g, r, e] = K x[l, b, g, 1, e]
    contract       out[l, b, g, 1, e] = sum over r of K z[l, b, g, r, e]
    add_gradient   the gradient of K from a pairing of x with z
"""

import torch
from torch import Tensor

from anymamba.ops.packing import ChunkTable

__all__ = ["Constant", "Varying", "coefficient", "grouped", "ungrouped"]


def coefficient(
    value: Tensor, compute: torch.dtype, groups: int, table: ChunkTable | None
) -> "Constant | Varying":
    """Prepare B or C: `(i, r)` is constant, `(b, s, g, r)` varies."""
    if value.dim() == 2:
        return Constant(value, compute, groups)
    return Varying(value, compute, table)


class Constant:
    """One `(i, r)` for all tokens."""

    def __init__(self, value_ir: Tensor, compute: torch.dtype, groups: int) -> None:
        self.dtype = value_ir.dtype
        self.value_gre = grouped(value_ir.to(compute), groups)

    def spread(self, chunk: slice, x_lbg1e: Tensor, out_lbgre: Tensor) -> Tensor:
        """Give every state entry its share of x."""
        return torch.mul(x_lbg1e, self.value_gre, out=out_lbgre)

    def contract(self, chunk: slice, z_lbgre: Tensor) -> Tensor:
        """Sum over the state axis."""
        return (z_lbgre * self.value_gre).sum(-2, keepdim=True)

    def new_gradient(self) -> Tensor:
        """Return what `add_gradient` adds to."""
        return torch.zeros_like(self.value_gre)

    def add_gradient(self, grad: Tensor, chunk: slice, x_lbg1e: Tensor, z_lbgre: Tensor) -> None:
        """Add a chunk's share, summed over tokens and batch."""
        grad += (x_lbg1e * z_lbgre).sum((0, 1))

    def finish(self, grad: Tensor) -> Tensor:
        """Return the gradient in the layout and dtype of the argument."""
        return ungrouped(grad).to(self.dtype)


class Varying:
    """One `(g, r)` per token, shared by the channels of a group."""

    def __init__(self, value_bsgr: Tensor, compute: torch.dtype, table: ChunkTable | None) -> None:
        self.compute = compute
        self.table = table
        self.value_bsgr = value_bsgr if table is None else table.spread(value_bsgr)

    def spread(self, chunk: slice, x_lbg1e: Tensor, out_lbgre: Tensor) -> Tensor:
        """Give every state entry its share of x."""
        return torch.mul(x_lbg1e, self._at(chunk).unsqueeze(-1), out=out_lbgre)

    def contract(self, chunk: slice, z_lbgre: Tensor) -> Tensor:
        """Sum over the state axis: one row times a matrix for each token and group."""
        return self._at(chunk).unsqueeze(-2) @ z_lbgre

    def new_gradient(self) -> Tensor:
        """Return what `add_gradient` writes to."""
        return torch.empty_like(self.value_bsgr, memory_format=torch.contiguous_format)

    def add_gradient(self, grad: Tensor, chunk: slice, x_lbg1e: Tensor, z_lbgre: Tensor) -> None:
        """Write a chunk's rows, summed over the channels of each group."""
        grad_lbg1r = x_lbg1e @ z_lbgre.transpose(-1, -2)
        grad[:, chunk] = grad_lbg1r.squeeze(-2).transpose(0, 1)

    def finish(self, grad: Tensor) -> Tensor:
        """Return the gradient in the layout of the argument."""
        return grad if self.table is None else self.table.gather(grad)

    def _at(self, chunk: slice) -> Tensor:
        return self.value_bsgr[:, chunk].transpose(0, 1).to(self.compute)


def grouped(x_ir: Tensor, groups: int) -> Tensor:
    """Turn (..., i, r) into contiguous (..., g, r, e)."""
    return x_ir.unflatten(-2, (groups, -1)).transpose(-1, -2).contiguous()


def ungrouped(x_gre: Tensor) -> Tensor:
    """Turn (..., g, r, e) into contiguous (..., i, r)."""
    return x_gre.transpose(-1, -2).flatten(-3, -2).contiguous()
