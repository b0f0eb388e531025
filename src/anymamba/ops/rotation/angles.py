"""Complex rotation: angle increments, their running sum, and the rotation of pairs of entries."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.errors import ConfigError, DtypeError, ShapeError
from anymamba.notation import bind_dims
from anymamba.ops.checks import check_floats, guard
from anymamba.ops.packing import Packing, chunk_table, packing

__all__ = [
    "PAIRINGS",
    "AngleScan",
    "angle_increment",
    "check_broadcast",
    "check_rows",
    "cumulate_angles",
    "mapped_first",
    "rotate_pairs",
    "wrap_angle",
]

PAIRINGS = ("interleaved", "half_split")

_TURN = 2 * math.pi
# README 5: 6.28125 has 8 significant bits, so its product with a count of turns is exact.
_TURN_HIGH = 6.28125
_TURN_LOW = _TURN - _TURN_HIGH

# README 3: tokens per block; units per radian, in which blocks are summed as integers; a turn.
_BLOCK = 32
_UNITS = 2**14
_TURN_UNITS = round(_TURN * _UNITS)
_TURN_REST = _TURN - _TURN_UNITS / _UNITS
_MOST_UNITS = 2.0**40


class AngleScan(NamedTuple):
    """Cumulative angles: correct modulo a full turn, small, differentiable."""

    angle_bsha: Tensor  # the angle after each token
    final_bha: Tensor  # the angle after the last token, in [-pi, pi]


def wrap_angle(angle: Tensor) -> Tensor:
    """Take whole turns off an angle; its gradient is exactly 1.

        angle - 2 pi round(angle / (2 pi))

    Args:
        angle: any shape; floating point.

    Returns:
        The same angle in [-pi, pi].

    Example:
        >>> wrap_angle(torch.tensor([0.5, 0.5 + 4 * math.pi]))
        tensor([0.5000, 0.5000])
    """
    turns = (angle.detach() / _TURN).round()
    return angle - turns * _TURN_HIGH - turns * _TURN_LOW


def angle_increment(raw: Tensor, dt: Tensor, rotation_range: float = 1.0) -> Tensor:
    """Turn projected numbers into the angle each token adds.

        dt * (rotation_range * pi) * tanh(raw)

    Args:
        raw: (..., 1 or h, a), any float dtype.
        dt: step sizes; (..., h, 1), broadcastable against `raw`.
        rotation_range: largest angle per unit of dt, in half turns.

    Returns:
        (..., h, a), in float32 when `raw` is a half type, otherwise in the dtype of `raw`.

    Raises:
        DtypeError: the dtypes are not those of activations and their accumulators.
    """
    compute = check_floats("angle_increment", {"raw": raw}, {"dt": dt})
    # The factor meets the small tensor; the product with dt is the only full-size one.
    return dt.to(compute) * (torch.tanh(raw.to(compute)) * (rotation_range * math.pi))


def cumulate_angles(
    increment_bsha: Tensor, initial_bha: Tensor, *, cu_seqlens: Tensor | None = None
) -> AngleScan:
    """Sum angle increments over time, from a given angle to a returned angle.

        angle[t] = initial + increment[1] + ... + increment[t]     (modulo 2 pi)

    Args:
        increment_bsha: the angle each token adds.
        initial_bha: the angle before the first token; one row per sequence when packed.
        cu_seqlens: borders of packed sequences; batch must then be 1.

    Returns:
        `AngleScan`; an empty sequence ends at its initial angle, wrapped.

    Raises:
        ShapeError: the sizes disagree.
        DtypeError: the dtypes are not those of activations and their accumulators.
        PackingError: the borders do not describe the row.

    Example:
        >>> scan = cumulate_angles(torch.ones(1, 7, 1, 1), torch.zeros(1, 1, 1))
        >>> wrap_angle(scan.angle_bsha).flatten()
        tensor([ 1.0000,  2.0000,  3.0000, -2.2832, -1.2832, -0.2832,  0.7168])
    """
    where = "cumulate_angles"
    rows = "initial_bha" if cu_seqlens is None else "initial_qha"
    dims = bind_dims(where, increment_bsha=increment_bsha, **{rows: initial_bha})
    compute = check_floats(where, {"increment": increment_bsha}, {"initial": initial_bha})
    guard(where, increment=increment_bsha, initial=initial_bha)
    increment_bsha, initial_bha = increment_bsha.to(compute), initial_bha.to(compute)
    if cu_seqlens is None:
        angle_bsha = _dense_sum(increment_bsha, initial_bha)
        return AngleScan(angle_bsha, wrap_angle(angle_bsha[:, -1]))
    pack = packing(where, cu_seqlens, dims["b"], dims["s"], increment_bsha.device)
    check_rows(where, pack, dims["q"])
    angle_bsha = _packed_sum(increment_bsha, initial_bha, pack)
    return AngleScan(angle_bsha, wrap_angle(pack.last(angle_bsha, initial_bha)))


def check_rows(where: str, pack: Packing, rows: int) -> None:
    """Check that a packed call brought one initial row per sequence."""
    if rows != pack.count:
        raise ShapeError(
            f"{where}: initial needs one row per packed sequence ({pack.count}); got {rows} rows."
        )


def _dense_sum(x_bsha: Tensor, initial_bha: Tensor) -> Tensor:
    """Sum over time modulo full turns, without a loop over any size (README 3)."""
    length = x_bsha.shape[1]
    if torch.compiler.is_compiling():
        # A compiler makes one graph each for no padding, one block and two; spare blocks of
        # zeros rule those cases out, so that one graph serves every length.
        blocks = length // _BLOCK + 3
        x_bsha = F.pad(x_bsha, (0, 0, 0, 0, 0, blocks * _BLOCK - length))
    else:
        blocks = -(-length // _BLOCK)
        if length % _BLOCK:
            x_bsha = F.pad(x_bsha, (0, 0, 0, 0, 0, blocks * _BLOCK - length))
    x_bnlha = x_bsha.unflatten(1, (blocks, _BLOCK))
    units_bnha, rest_bnha = _block_totals(x_bnlha)
    units_bnha = units_bnha.cumsum(1) - units_bnha
    rest_bnha = F.pad(rest_bnha.cumsum(1)[:, :-1], (0, 0, 0, 0, 1, 0))
    start_bnha = initial_bha.unsqueeze(1) + rest_bnha + _angle_of_units(units_bnha, x_bsha.dtype)
    angle_bnlha = x_bnlha.cumsum(2) + wrap_angle(start_bnha).unsqueeze(2)
    return angle_bnlha.flatten(1, 2)[:, :length]


def _packed_sum(x_1sha: Tensor, initial_qha: Tensor, pack: Packing) -> Tensor:
    """Sum inside each packed sequence; only integers, which know no NaN, are ever subtracted."""
    table = chunk_table(pack, _BLOCK)
    sequence_n = table.sequence_n
    x_nlha = table.spread(x_1sha)[0].unflatten(0, (-1, _BLOCK))
    units_nha, rest_nha = _block_totals(x_nlha.unsqueeze(0))
    units_nha, rest_nha = units_nha[0], rest_nha[0]
    units_nha = units_nha.cumsum(0) - units_nha
    first_n = torch.searchsorted(sequence_n, sequence_n)
    units_nha = units_nha - units_nha.index_select(0, first_n)
    none = rest_nha.new_zeros(())
    offset = 1
    while offset < rest_nha.shape[0]:
        is_same = (sequence_n[offset:] == sequence_n[:-offset])[:, None, None]
        earlier = torch.where(is_same, rest_nha[:-offset], none)
        rest_nha = torch.cat([rest_nha[:offset], rest_nha[offset:] + earlier])
        offset *= 2
    rest_nha = F.pad(rest_nha[:-1], (0, 0, 0, 0, 1, 0))
    rest_nha = torch.where(table.is_first_n[:, None, None], none, rest_nha)
    initial_nha = initial_qha.index_select(0, sequence_n.clamp(max=pack.count - 1))
    start_nha = wrap_angle(initial_nha + rest_nha + _angle_of_units(units_nha, x_1sha.dtype))
    return table.gather((x_nlha.cumsum(1) + start_nha.unsqueeze(1)).flatten(0, 1).unsqueeze(0))


def _block_totals(x_bnlha: Tensor) -> tuple[Tensor, Tensor]:
    """Return each block's sum as whole units (integers) and a small differentiable rest."""
    whole_bnlha = (x_bnlha.detach() * _UNITS).round_()
    rest_bnlha = torch.sub(x_bnlha, whole_bnlha, alpha=1 / _UNITS)
    # The rest carries NaN and infinity on; an integer cannot.
    units_bnha = whole_bnlha.sum(2).nan_to_num(0.0, 0.0, 0.0).clamp(-_MOST_UNITS, _MOST_UNITS)
    return units_bnha.to(torch.int64), rest_bnlha.sum(2)


def _angle_of_units(units: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a count of units into an angle in [0, 2 pi), or near it by the rest of the turns."""
    turns = units.div(_TURN_UNITS, rounding_mode="floor")
    units = units - turns * _TURN_UNITS
    return units.to(dtype) / _UNITS - turns.to(dtype) * _TURN_REST


def rotate_pairs(x: Tensor, angle: Tensor, pairing: str) -> Tensor:
    """Rotate pairs of entries by an angle each.

        (u, w) -> (u cos - w sin, u sin + w cos)

    Args:
        x: (..., r); r even.
        angle: (..., a), a <= r / 2; leading axes broadcast to those of `x`. Pair j < a turns by
            `angle[..., j]`; the other entries pass through; a = 0 is the identity.
        pairing: "interleaved" pairs entries (2j, 2j + 1), "half_split" (j, j + r / 2).

    Returns:
        The shape and dtype of `x`; half types are rotated in float32.

    Raises:
        ShapeError: r is odd, there are more angles than pairs, or the axes do not broadcast.
        ConfigError: the pairing is unknown.

    Example:
        >>> rotate_pairs(torch.tensor([1.0, 0, 5, 5]), torch.tensor([math.pi]), "interleaved")
        tensor([-1.0000e+00, -8.7423e-08,  5.0000e+00,  5.0000e+00])
    """
    where = "rotate_pairs"
    if pairing not in PAIRINGS:
        raise ConfigError(f"{where}: pairing must be one of {PAIRINGS}; got {pairing!r}.")
    if not isinstance(x, Tensor) or not isinstance(angle, Tensor):
        raise DtypeError(f"{where}: x and angle must be tensors.")
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ShapeError(
            f"{where}: the last axis of x must have an even size; got shape {tuple(x.shape)}."
        )
    check_broadcast(where, "angle", angle, 1, x)
    if angle.shape[-1] > x.shape[-1] // 2:
        raise ShapeError(
            f"{where}: angle may have at most one entry per pair ({x.shape[-1] // 2}); "
            f"got {angle.shape[-1]}."
        )
    if angle.shape[-1] == 0:
        return x
    angle = angle.to(check_floats(where, {"x": x}, {"angle": angle}))
    if torch.compiler.is_compiling():
        return _rotate_traced(x, angle, pairing)
    return _PairRotation.apply(x, angle, pairing)


def check_broadcast(where: str, name: str, small: Tensor, inner: int, x: Tensor) -> None:
    """Check that `small` without its `inner` last axes broadcasts to `x` without its last one."""
    if small.dim() < inner:
        raise ShapeError(f"{where}: {name} needs at least {inner} axes; got {small.dim()}.")
    lead, target = small.shape[: small.dim() - inner], x.shape[:-1]
    fits = len(lead) <= len(target) and all(
        size in (1, wanted) for size, wanted in zip(reversed(lead), reversed(target), strict=False)
    )
    if not fits:
        raise ShapeError(
            f"{where}: the leading axes of {name} {tuple(small.shape)} must broadcast to those of "
            f"x {tuple(x.shape)}. Insert axes of size 1 where {name} is shared."
        )


def _pairs(x: Tensor, count: int, pairing: str) -> tuple[Tensor, Tensor]:
    if pairing == "interleaved":
        return x[..., 0 : 2 * count : 2], x[..., 1 : 2 * count : 2]
    half = x.shape[-1] // 2
    return x[..., :count], x[..., half : half + count]


def _untouched(x: Tensor, count: int, pairing: str) -> Sequence[Tensor]:
    if pairing == "interleaved":
        return (x[..., 2 * count :],)
    half = x.shape[-1] // 2
    return x[..., count:half], x[..., half + count :]


def _rotate_traced(x: Tensor, angle: Tensor, pairing: str) -> Tensor:
    """Rotate in plain differentiable torch, which a compiler fuses into one loop."""
    count = angle.shape[-1]
    cos, sin = angle.cos(), angle.sin()
    u, w = _pairs(x, count, pairing)
    turned = (u * cos - w * sin).to(x.dtype), (u * sin + w * cos).to(x.dtype)
    return _joined(turned, _untouched(x, count, pairing), pairing)


def _joined(turned: tuple[Tensor, Tensor], rest: Sequence[Tensor], pairing: str) -> Tensor:
    """Undo `_pairs` and `_untouched`."""
    if pairing == "interleaved":
        return torch.cat([torch.stack(turned, -1).flatten(-2), rest[0]], -1)
    return torch.cat([turned[0], rest[0], turned[1], rest[1]], -1)


class _PairRotation(torch.autograd.Function):
    """The rotation, written straight into its result; saves its arguments only (README 4)."""

    @staticmethod
    def forward(x: Tensor, angle: Tensor, pairing: str) -> Tensor:
        count = angle.shape[-1]
        cos, sin = angle.cos(), angle.sin()
        u, w = (part.to(angle.dtype) for part in _pairs(x, count, pairing))
        out = torch.empty_like(x)
        out_u, out_w = _pairs(out, count, pairing)
        out_u.copy_((u * cos).addcmul_(w, sin, value=-1))
        out_w.copy_((u * sin).addcmul_(w, cos))
        for target, source in zip(
            _untouched(out, count, pairing), _untouched(x, count, pairing), strict=True
        ):
            target.copy_(source)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, angle, ctx.pairing = inputs
        ctx.save_for_backward(x, angle)
        ctx.save_for_forward(x, angle)

    @staticmethod
    def jvp(ctx: Any, tangent_x: Tensor, tangent_angle: Tensor, _: None) -> Tensor:
        x, angle = ctx.saved_tensors
        turned = _rotate_traced(tangent_x, angle, ctx.pairing)
        # A quarter turn ahead of the rotated pairs, times the speed of the angle.
        u, w = _pairs(_rotate_traced(x, angle, ctx.pairing), angle.shape[-1], ctx.pairing)
        change = -w * tangent_angle, u * tangent_angle
        rest = [torch.zeros_like(part) for part in _untouched(x, angle.shape[-1], ctx.pairing)]
        return turned + _joined(change, rest, ctx.pairing).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, angle = ctx.saved_tensors
        grad_x = _PairRotation.apply(grad.to(angle.dtype), -angle, ctx.pairing)
        grad_angle = None
        if ctx.needs_input_grad[1]:
            u, w = _pairs(x, angle.shape[-1], ctx.pairing)
            grad_u, grad_w = _pairs(grad_x, angle.shape[-1], ctx.pairing)
            grad_angle = (u * grad_w - w * grad_u).sum_to_size(angle.shape)
        return grad_x.to(x.dtype), grad_angle, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, angle: Tensor, pairing: str) -> Any:
        x = mapped_first(x, in_dims[0], info.batch_size, 0)
        if in_dims[1] is not None:
            angle = mapped_first(angle, in_dims[1], info.batch_size, x.dim())
        return _PairRotation.apply(x, angle, pairing), 0


def mapped_first(x: Tensor, dim: int | None, size: int, rank: int) -> Tensor:
    """Bring a mapped axis to the front, then broadcast axes until there are `rank` in all."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.reshape(size, *[1] * (rank - x.dim()), *x.shape[1:])
