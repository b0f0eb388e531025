"""Tensor parallelism: every rank runs some heads of every block, and some of every MLP's width.

A split block is a block with fewer heads. Heads need rows of the fused projection from all over it
(z, x, dt, ...), and groups of B and C that other ranks may need too. The sums over ranks: outputs
of `out_proj` and `fc2`, gradients of inputs, Mamba-1's `x_proj`, and the mean square of Mamba-2's
gated norm where a group of channels lies on several ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from anymamba.errors import BackendError
from anymamba.nn.mamba1 import Mamba
from anymamba.nn.mamba2 import Mamba2
from anymamba.nn.mamba3 import Mamba3
from anymamba.nn.mlp import GatedMLP
from anymamba.nn.norm import RMSNorm, RMSNormGated
from anymamba.nn.parallel.local import copy_in, split_module, sum_out, sum_over, whole
from anymamba.ops import accumulate_dtype

__all__ = ["tensor_parallel"]

WHERE = "tensor_parallel"
Rows = list[list[int]]


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split every Mamba block and gated MLP of a model over the ranks of a mesh, in place.

    Attention, norms outside blocks, embedding and head stay whole on every rank. The inputs must be
    the same on every rank; so are the outputs, and the gradients of what stays whole.

    Args:
        model: the same weights on every rank.
        mesh: one axis.

    Raises:
        BackendError: the ranks do not divide the heads, the groups or a width.
    """
    for name, module in list(model.named_modules()):
        split = _SPLITS.get(type(module))
        if split is not None:
            split(module, mesh, name or type(module).__name__)


class _In(nn.Linear):
    """A projection whose outputs the ranks share out."""

    group: "dist.ProcessGroup"

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(copy_in(input, self.group), self.weight, self.bias)


class _Own(nn.Linear):
    """A projection of what a rank has to what it needs."""


class _Out(nn.Linear):
    """A projection whose inputs the ranks share, to outputs that are the same everywhere."""

    group: "dist.ProcessGroup"

    def forward(self, input: Tensor) -> Tensor:
        y = sum_out(F.linear(input, self.weight), self.group)
        return y if self.bias is None else y + self.bias


class _Across(nn.Linear):
    """A projection whose inputs the ranks share, to outputs that each uses in its own way."""

    group: "dist.ProcessGroup"

    def forward(self, input: Tensor) -> Tensor:
        return sum_over(F.linear(input, self.weight), self.group)


class _SummedNorm(RMSNormGated):
    """The gated norm of a group whose channels lie on several ranks."""

    group: "dist.ProcessGroup"
    groups: int
    mine: int
    channels: int

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        compute = accumulate_dtype(x.dtype)
        x_wide, gate = x.to(compute), F.silu(z.to(compute))
        if not self.norm_before_gate:
            x_wide = x_wide * gate
        square = x_wide.square().sum(-1, keepdim=True)
        # One place per group, so that one sum over all ranks serves however many groups there are.
        places = [
            square if g == self.mine else torch.zeros_like(square) for g in range(self.groups)
        ]
        total = sum_over(torch.cat(places, -1), self.group)[..., self.mine, None]
        y = x_wide * torch.rsqrt(total / self.channels + self.eps) * self.weight.to(compute)
        return (y * gate if self.norm_before_gate else y).to(x.dtype)


def _split_linear(
    module: nn.Module, kind: type[nn.Linear], dim: int, rows: Rows, mesh: DeviceMesh
) -> None:
    """Split a projection by its outputs (0) or inputs (1); a bias follows the outputs."""
    assert isinstance(module, nn.Linear)
    needed: dict[str, Any] = {"weight": (dim, rows, True)}
    if module.bias is not None:
        ranks = len(rows)
        needed["bias"] = (0, rows, True) if dim == 0 else (0, whole(len(module.bias), ranks), False)
    sizes = {0: "out_features", 1: "in_features"}
    setattr(module, sizes[dim], len(rows[mesh.get_local_rank()]))
    split_module(module, kind, needed, mesh)
    module.__dict__["group"] = mesh.get_group()


def _split_conv(module: nn.Module, rows: Rows, mesh: DeviceMesh) -> None:
    assert isinstance(module, nn.Conv1d)
    module.groups = module.in_channels = module.out_channels = len(rows[mesh.get_local_rank()])
    split_module(module, nn.Conv1d, dict.fromkeys(("weight", "bias"), (0, rows, True)), mesh)


def _even(where: str, what: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise BackendError(
            f"{WHERE}: {where}: the ranks must divide {what}; got {ranks} ranks and {size}. "
            "Use fewer ranks."
        )
    return size // ranks


def _share(size: int, ranks: int, start: int = 0) -> Rows:
    """Return equal neighbouring parts of `size` rows that begin at `start`."""
    many = size // ranks
    return [list(range(start + r * many, start + (r + 1) * many)) for r in range(ranks)]


def _joined(parts: list[Rows]) -> Rows:
    return [[row for rows in column for row in rows] for column in zip(*parts, strict=True)]


def _groups(where: str, groups: int, ranks: int) -> list[list[int]]:
    """Return the groups of B and C that each rank needs."""
    if groups % ranks == 0:
        return _share(groups, ranks)
    if ranks % groups:
        raise BackendError(
            f"{WHERE}: {where}: the groups of B and C must divide the ranks, or the other way "
            f"round; got {groups} groups and {ranks} ranks."
        )
    return [[r * groups // ranks] for r in range(ranks)]


def _grouped(needed: list[list[int]], outer: int, groups: int, size: int, start: int) -> Rows:
    """Return the rows of B or C, laid out as (outer, groups, size), that each rank needs."""
    return [
        [
            start + (o * groups + g) * size + i
            for o in range(outer)
            for g in mine
            for i in range(size)
        ]
        for mine in needed
    ]


def _fused(sizes: dict[str, int], parts: Callable[[str, int, int], Rows]) -> Rows:
    """Return the rows of a fused projection, segment after segment."""
    rows, start = [], 0
    for name, size in sizes.items():
        rows.append(parts(name, size, start))
        start += size
    return _joined(rows)


def _mamba1(block: Mamba, mesh: DeviceMesh, where: str) -> None:
    ranks = mesh.size()
    inner = _even(where, "the inner width", block.d_inner, ranks)
    channels = _share(block.d_inner, ranks)
    both = _joined([channels, _share(block.d_inner, ranks, block.d_inner)])
    _split_linear(block.in_proj, _In, 0, both, mesh)
    _split_conv(block.conv1d, channels, mesh)
    _split_linear(block.x_proj, _Across, 1, channels, mesh)
    _split_linear(block.dt_proj, _Own, 0, channels, mesh)
    _split_linear(block.out_proj, _Out, 1, channels, mesh)
    _split_block(block, Mamba, dict.fromkeys(("A_log", "D"), channels), mesh)
    block.d_inner = inner


def _mamba2(block: Mamba2, mesh: DeviceMesh, where: str) -> None:
    ranks, groups, size = mesh.size(), block.ngroups, block.d_state
    heads = _even(where, "the heads", block.nheads, ranks)
    mlp = _even(where, "the width beside the scan", block.d_mlp, ranks)
    needed = _groups(where, groups, ranks)

    def rows(name: str, many: int, start: int) -> Rows:
        if name in ("B", "C"):
            return _grouped(needed, 1, groups, size, start)
        return _share(many, ranks, start)

    fused = block.projection_rows["in_proj"]
    _split_linear(block.in_proj, _In, 0, _fused(fused, rows), mesh)
    _split_conv(block.conv1d, _fused({n: fused[n] for n in ("x", "B", "C")}, rows), mesh)
    ends = _joined([_share(block.d_mlp, ranks), _share(block.d_ssm, ranks, block.d_mlp)])
    _split_linear(block.out_proj, _Out, 1, ends, mesh)
    if block.rmsnorm:
        channels = block.d_ssm // groups
        kind = RMSNormGated if groups % ranks == 0 else _SummedNorm
        split_module(block.norm, kind, {"weight": (0, _share(block.d_ssm, ranks), True)}, mesh)
        if kind is _SummedNorm:
            norm: Any = block.norm
            norm.group, norm.groups, norm.channels = mesh.get_group(), groups, channels
            norm.mine = needed[mesh.get_local_rank()][0]
    names = ["dt_bias", "A_log", "D", *(["init_states"] if block.init_states is not None else [])]
    by_head = {n: _share(len(block._parameters[n]), ranks) for n in names}  # pyright: ignore[reportArgumentType]
    _split_block(block, Mamba2, by_head, mesh)
    block.nheads, block.ngroups = heads, len(needed[0])
    block.d_mlp, block.d_ssm = mlp, heads * block.headdim
    block.d_inner = block.d_mlp + block.d_ssm
    block.conv_dim = block.d_ssm + 2 * block.ngroups * size


def _mamba3(block: Mamba3, mesh: DeviceMesh, where: str) -> None:
    ranks, groups, size = mesh.size(), block.ngroups, block.d_state
    heads = _even(where, "the heads", block.nheads, ranks)
    needed = _groups(where, groups, ranks)
    rotation = block.rotation

    def rows(name: str, many: int, start: int) -> Rows:
        if name in ("B", "C"):
            return _grouped(needed, block.mimo_rank, groups, size, start)
        if name == "rotation" and rotation.kind == "complex":
            return [list(range(start, start + many))] * ranks
        return _share(many, ranks, start)

    fused = _fused(block.projection_rows["in_proj"], rows)
    _split_linear(block.in_proj, _In, 0, fused, mesh)
    _split_linear(block.out_proj, _Out, 1, _share(block.d_inner, ranks), mesh)
    for norm in (block.B_norm, block.C_norm):
        split_module(norm, RMSNorm, {"weight": (0, whole(size, ranks), True)}, mesh)
    if block.is_outproj_norm:
        needs = {"weight": (0, _share(block.d_inner, ranks), True)}
        split_module(block.norm, RMSNormGated, needs, mesh)
    names = [name for name, value in block._parameters.items() if value is not None]
    _split_block(block, Mamba3, {n: _share(block.nheads, ranks) for n in names}, mesh)
    block.nheads, block.ngroups, block.d_inner = heads, len(needed[0]), heads * block.headdim
    rotation.heads = heads
    rotation.channels = (
        rotation.angles if rotation.kind == "complex" else heads * 3 * rotation.blocks
    )
    keys = block.mimo_rank * block.ngroups * size
    inner = block.d_inner
    block.split_sizes = [inner, inner, keys, keys, heads, heads, heads, rotation.channels]


def _split_block(
    block: Any, kind: type[nn.Module], rows: dict[str, Rows], mesh: DeviceMesh
) -> None:
    split_module(block, kind, {n: (0, needed, True) for n, needed in rows.items()}, mesh)
    block._specs_by_dtype.clear()


def _gated_mlp(mlp: GatedMLP, mesh: DeviceMesh, where: str) -> None:
    ranks, hidden = mesh.size(), mlp.fc2.in_features
    _even(where, "the hidden width", hidden, ranks)
    halves = _joined([_share(hidden, ranks), _share(hidden, ranks, hidden)])
    _split_linear(mlp.fc1, _In, 0, halves, mesh)
    _split_linear(mlp.fc2, _Out, 1, _share(hidden, ranks), mesh)


_SPLITS: dict[type, Callable[[Any, DeviceMesh, str], None]] = {
    Mamba: _mamba1,
    Mamba2: _mamba2,
    Mamba3: _mamba3,
    GatedMLP: _gated_mlp,
}
