"""Parameters of which every rank holds a part, seen by the module's own code as plain tensors.

A layer that is split runs as a smaller layer of its kind: fewer heads, the same code. What it needs
of an official tensor is a list of rows, in its own order. Rows that one rank needs are sharded,
rows that several need are replicated, and their gradients summed; both are distributed tensors of
torch, so that optimisers, `fully_shard` and distributed checkpoints know them. They are registered
as `weight_own` and `weight_shared`; `weight` is a property that puts this rank's rows together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from anymamba.errors import BackendError

__all__ = ["Piece", "copy_in", "split_module", "sum_out", "sum_over", "whole"]

OWN, SHARED = "_own", "_shared"


@dataclass(frozen=True)
class Piece:
    """Where the rows of one official tensor went.

    Attributes:
        dim: the axis that is split.
        own: official rows of the sharded part, rank by rank; None if there is none.
        shared: official rows of the replicated part; None if there is none.
        order: this rank's rows among its own and then the shared ones; None if all in order.
        is_partial: whether a rank's gradient of the replicated part is only its share.
    """

    dim: int
    own: Tensor | None
    shared: Tensor | None
    order: Tensor | None
    is_partial: bool

    @property
    def rows(self) -> dict[str, Tensor]:
        """The official rows of each part, by the ending of its name."""
        both = {OWN: self.own, SHARED: self.shared}
        return {ending: rows for ending, rows in both.items() if rows is not None}

    def parts(self, official: Tensor) -> dict[str, Tensor]:
        """Return the parts of a whole tensor, by the endings of their names.

        A number, such as a count of steps, is that of every part.
        """
        if official.dim() == 0:
            return dict.fromkeys(self.rows, official)
        return {
            ending: official.index_select(self.dim, rows.to(official.device))
            for ending, rows in self.rows.items()
        }

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Put whole parts together: the inverse of `parts`, bit for bit."""
        like = parts[next(iter(self.rows))]
        if like.dim() == 0:
            return like
        shape = list(like.shape)
        shape[self.dim] = sum(len(rows) for rows in self.rows.values())
        official = like.new_empty(shape)
        for ending, rows in self.rows.items():
            official.index_copy_(self.dim, rows.to(like.device), parts[ending])
        return official


def whole(size: int, ranks: int) -> list[list[int]]:
    """Return the rows of a tensor that every rank needs."""
    return [list(range(size))] * ranks


def piece_of(rows: Sequence[Sequence[int]], rank: int, dim: int, is_partial: bool = True) -> Piece:
    """Tell what is sharded and what is replicated from the rows that each rank needs."""
    needed: dict[int, int] = {}
    for part in rows:
        for row in part:
            needed[row] = needed.get(row, 0) + 1
    own = [[row for row in part if needed[row] == 1] for part in rows]
    shared = sorted(row for row, times in needed.items() if times > 1)
    if len({len(part) for part in own}) != 1:
        raise BackendError("tensor_parallel: every rank must own as many rows as the others.")
    held = {row: place for place, row in enumerate([*own[rank], *shared])}
    order = [held[row] for row in rows[rank]]
    is_plain = order == list(range(len(held)))
    flat = [row for part in own for row in part]
    return Piece(
        dim,
        torch.tensor(flat) if flat else None,
        torch.tensor(shared) if shared else None,
        None if is_plain else torch.tensor(order),
        is_partial,
    )


def split_module(
    module: nn.Module,
    kind: type[nn.Module],
    rows: Mapping[str, tuple[int, Sequence[Sequence[int]], bool]],
    mesh: DeviceMesh,
) -> None:
    """Replace parameters of a module by their parts; its code sees this rank's rows.

    Args:
        module: changed in place.
        kind: what it becomes: a class with the module's own as a base, or that itself.
        rows: for each parameter the axis, the rows of each rank, and whether a rank's gradient of
            shared rows is its share only.
        mesh: one axis.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    pieces: dict[str, Piece] = {}
    for name, (dim, needed, is_partial) in rows.items():
        parameter = module._parameters.pop(name)
        if parameter is None:
            module._parameters[name] = None
            continue
        piece = piece_of(needed, mesh.get_local_rank(), dim, is_partial)
        places = {OWN: Shard(dim), SHARED: Replicate()}
        for ending, part in piece.parts(parameter.detach()).items():
            made: DTensor = distribute_tensor(part, mesh, [places[ending]])
            new = nn.Parameter(made, requires_grad=parameter.requires_grad)
            for tag in ("_no_weight_decay", "_no_reinit"):
                if getattr(parameter, tag, False):
                    setattr(new, tag, True)
            module._parameters[name + ending] = new
        pieces[name] = piece
    properties: dict[str, Any] = {name: property(_reader(name, pieces[name])) for name in pieces}
    module.__class__ = type(kind.__name__, (kind,), properties)
    module.__dict__["pieces"] = pieces


def _reader(name: str, piece: Piece) -> Any:
    def read(self: nn.Module) -> Tensor:
        return _local(self._parameters, name, piece)

    return read


def _local(parameters: Mapping[str, Any], name: str, piece: Piece) -> Tensor:
    """Return this rank's rows; differentiable."""
    from torch.distributed.tensor import Partial, Replicate

    parts = []
    if piece.own is not None:
        parts.append(parameters[name + OWN].to_local())
    if piece.shared is not None:
        place = Partial() if piece.is_partial else Replicate()
        parts.append(parameters[name + SHARED].to_local(grad_placements=[place]))
    held = parts[0] if len(parts) == 1 else torch.cat(parts, piece.dim)
    if piece.order is None:
        return held
    return held.index_select(piece.dim, piece.order.to(held.device))


def copy_in(x: Tensor, group: "dist.ProcessGroup") -> Tensor:
    """Return x; its gradient is summed over the ranks, each of which uses a part of it."""
    return _Sum.apply(x, group, False, True)


def sum_out(x: Tensor, group: "dist.ProcessGroup") -> Tensor:
    """Return the sum over the ranks, which all go on with the same."""
    return _Sum.apply(x, group, True, False)


def sum_over(x: Tensor, group: "dist.ProcessGroup") -> Tensor:
    """Return the sum over the ranks, of which each makes something else."""
    return _Sum.apply(x, group, True, True)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: "dist.ProcessGroup", ahead: bool, back: bool) -> Tensor:
        ctx.group, ctx.back = group, back
        return _reduced(x, group) if ahead else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _reduced(grad, ctx.group) if ctx.back else grad, None, None, None


def _reduced(x: Tensor, group: "dist.ProcessGroup") -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
