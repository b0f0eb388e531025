"""Quaternion rotation: algebra, increments, and the rotation of blocks of four entries.

A quaternion is (w, x, y, z) on the last axis. Block j of a state is its entries 4j .. 4j + 3.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.errors import DtypeError, ShapeError
from anymamba.ops.checks import check_floats
from anymamba.ops.numerics import accumulate_dtype, div_eps
from anymamba.ops.rotation.angles import check_broadcast, mapped_first

__all__ = [
    "QuaternionScan",
    "bound_rotation_vector",
    "product_into",
    "quaternion_conjugate",
    "quaternion_from_vector",
    "quaternion_increment",
    "quaternion_multiply",
    "quaternion_normalize",
    "quaternion_to_matrix",
    "rotate_blocks",
    "safe_norm",
]

# Hamilton's table: component k of a product is the sum of sign * a[i] * b[j].
_TERMS = (
    ((0, 0, 1), (1, 1, -1), (2, 2, -1), (3, 3, -1)),
    ((0, 1, 1), (1, 0, 1), (2, 3, 1), (3, 2, -1)),
    ((0, 2, 1), (1, 3, -1), (2, 0, 1), (3, 1, 1)),
    ((0, 3, 1), (1, 2, 1), (2, 1, -1), (3, 0, 1)),
)


class QuaternionScan(NamedTuple):
    """Cumulative rotations: unit quaternions, differentiable."""

    quaternion_bshj4: Tensor  # the rotation after each token
    final_bhj4: Tensor  # the rotation after the last token


def product_into(
    out: Tensor, a: Tensor, b: Tensor, *, conjugate_a: bool = False, conjugate_b: bool = False
) -> None:
    """Write a (x) b into `out`, components on the first axis; not differentiable.

    At most one factor may be conjugated. `out` must not share memory with a factor.
    """
    # Taken apart once: indexing inside the loop would cost as much as small products.
    parts_a, parts_b = a.unbind(0), b.unbind(0)
    for k, (part, terms) in enumerate(zip(out.unbind(0), _TERMS, strict=True)):
        # The opening term, w times component k, must be the one that conjugation leaves positive.
        first = (k, 0) if conjugate_b else (0, k)
        torch.mul(parts_a[first[0]], parts_b[first[1]], out=part)
        for i, j, sign in terms:
            if (i, j) != first:
                flips = (conjugate_a and i > 0) != (conjugate_b and j > 0)
                part.addcmul_(parts_a[i], parts_b[j], value=-sign if flips else sign)


def quaternion_multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply quaternions: a (x) b, the rotation b followed by the rotation a.

    Args:
        a: (..., 4).
        b: (..., 4); the leading axes broadcast.

    Returns:
        (..., 4).

    Raises:
        ShapeError: a last axis is not 4, or the leading axes do not broadcast.

    Example:
        >>> i, j = torch.tensor([0.0, 1, 0, 0]), torch.tensor([0.0, 0, 1, 0])
        >>> quaternion_multiply(i, j)
        tensor([0., 0., 0., 1.])
    """
    where = "quaternion_multiply"
    _check_last(where, "a", a, 4)
    _check_last(where, "b", b, 4)
    check_floats(where, {"a": a, "b": b})
    try:
        shape = torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        raise ShapeError(
            f"{where}: the leading axes must broadcast; got {tuple(a.shape)} and {tuple(b.shape)}."
        ) from None
    if torch.compiler.is_compiling():
        return _multiply_traced(a, b)
    return _Product.apply(a.expand(shape), b.expand(shape))


def _multiply_traced(a: Tensor, b: Tensor) -> Tensor:
    """Multiply in plain differentiable torch, which a compiler fuses into one loop."""
    parts_a, parts_b = (_accumulated(x).unbind(-1) for x in (a, b))
    out = [
        sum(sign * parts_a[i] * parts_b[j] for i, j, sign in terms[1:])
        + parts_a[terms[0][0]] * parts_b[terms[0][1]]
        for terms in _TERMS
    ]
    return torch.stack(out, -1).to(a.dtype)


def quaternion_conjugate(q: Tensor) -> Tensor:
    """Negate the vector part: the inverse of a unit quaternion."""
    _check_last("quaternion_conjugate", "q", q, 4)
    return torch.cat([q[..., :1], -q[..., 1:]], -1)


def quaternion_normalize(q: Tensor) -> Tensor:
    """Divide by the length; the zero quaternion stays zero with a finite gradient.

    The sum of squares is floored before the root, so neither the root nor its slope meets zero.
    """
    _check_last("quaternion_normalize", "q", q, 4)
    wide = _accumulated(q)
    square = (wide * wide).sum(-1, keepdim=True).clamp(min=div_eps(wide.dtype))
    return (wide * square.rsqrt()).to(q.dtype)


def safe_norm(x: Tensor) -> Tensor:
    """Return the length over the last axis, kept as size 1; no square can overflow.

        c = max|x| + eps        sqrt(max(sum((x / c)^2), eps)) * c

    c counts as a constant; the result and its gradient are finite at zero too. Half types are
    measured in float32.
    """
    wide = _accumulated(x)
    eps = div_eps(wide.dtype)
    largest = wide.detach().abs().amax(-1, keepdim=True) + eps
    unit = wide / largest
    return (unit * unit).sum(-1, keepdim=True).clamp(min=eps).sqrt() * largest


def bound_rotation_vector(v: Tensor, limit: float) -> Tensor:
    """Shorten vectors to less than `limit`, keeping their direction.

        v * limit * tanh(|v|) / |v|

    Near zero this is `limit * v`; where it saturates, the direction still has a gradient.
    """
    norm = safe_norm(v)
    return v * (limit * torch.tanh(norm) / norm)


def quaternion_from_vector(g: Tensor) -> Tensor:
    """Turn rotation vectors (axis times angle) into unit quaternions.

        (cos(|g| / 2), sin(|g| / 2) g / |g|)

    Args:
        g: (..., 3); zero gives the identity with a finite gradient.

    Returns:
        (..., 4).

    Example:
        >>> quaternion_from_vector(torch.tensor([math.pi, 0, 0]))
        tensor([-4.3711e-08,  1.0000e+00,  0.0000e+00,  0.0000e+00])
    """
    _check_last("quaternion_from_vector", "g", g, 3)
    norm = safe_norm(g)
    half = norm / 2
    return quaternion_normalize(torch.cat([half.cos(), g * (half.sin() / norm)], -1))


def quaternion_increment(raw_hj3: Tensor, dt: Tensor, rotation_range: float = 1.0) -> Tensor:
    """Turn projected vectors into the rotation each token adds.

        g = dt * bound_rotation_vector(raw, rotation_range * pi)        q = (cos |g|/2, ...)

    Equal to `quaternion_from_vector(g)`. The length of g is dt * range * pi * tanh(|raw|), known
    without measuring g, so one norm serves both steps.

    Args:
        raw_hj3: (..., h, j, 3), any float dtype.
        dt: step sizes; (..., h), broadcastable against the leading axes of `raw_hj3`.
        rotation_range: largest angle per unit of dt, in half turns.

    Returns:
        Unit quaternions (..., h, j, 4), in float32 when `raw_hj3` is a half type.

    Raises:
        ShapeError: the last axis of `raw_hj3` is not 3.
        DtypeError: the dtypes are not those of activations and their accumulators.
    """
    where = "quaternion_increment"
    _check_last(where, "raw", raw_hj3, 3)
    compute = check_floats(where, {"raw": raw_hj3}, {"dt": dt})
    vector_hj3 = raw_hj3.to(compute)
    norm_hj1 = safe_norm(vector_hj3)
    turn = dt.to(compute)[..., None, None] * (rotation_range * math.pi / 2)
    half_hj1 = turn * torch.tanh(norm_hj1)
    axis_hj3 = vector_hj3 * (half_hj1.sin() / norm_hj1)
    return torch.cat([half_hj1.cos(), axis_hj3], -1)


def quaternion_to_matrix(q: Tensor) -> Tensor:
    """Return the matrix of left multiplication: `matrix(q) @ b` is `q (x) b`.

    Orthogonal with determinant 1 when q is unit, and `matrix(a (x) b) = matrix(a) @ matrix(b)`.

    Args:
        q: (..., 4).

    Returns:
        (..., 4, 4).
    """
    _check_last("quaternion_to_matrix", "q", q, 4)
    w, x, y, z = q.unbind(-1)
    rows = ((w, -x, -y, -z), (x, w, -z, y), (y, z, w, -x), (z, -y, x, w))
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def rotate_blocks(x: Tensor, quaternion: Tensor) -> Tensor:
    """Rotate blocks of four entries by the inverse of a quaternion each.

        block[j] -> conj(q[j]) (x) block[j]

    Args:
        x: (..., r).
        quaternion: (..., j, 4), 4 j <= r; leading axes broadcast to those of `x`. Entries from 4 j
            on pass through; j = 0 is the identity.

    Returns:
        The shape and dtype of `x`; half types are rotated in float32.

    Raises:
        ShapeError: there are more blocks than fit, or the axes do not broadcast.
    """
    where = "rotate_blocks"
    _check_last(where, "quaternion", quaternion, 4)
    if not isinstance(x, Tensor):
        raise DtypeError(f"{where}: x must be a tensor; got {type(x).__name__}.")
    if x.dim() == 0:
        raise ShapeError(f"{where}: x needs at least one axis; got a scalar.")
    check_broadcast(where, "quaternion", quaternion, 2, x)
    width = 4 * quaternion.shape[-2]
    if width > x.shape[-1]:
        raise ShapeError(
            f"{where}: {quaternion.shape[-2]} blocks need {width} entries on the last axis of x; "
            f"got shape {tuple(x.shape)}."
        )
    if width == 0:
        return x
    quaternion = quaternion.to(check_floats(where, {"x": x}, {"quaternion": quaternion}))
    if torch.compiler.is_compiling():
        turned = _multiply_traced(quaternion_conjugate(quaternion), _blocks(x, quaternion))
        return torch.cat([turned.to(x.dtype).flatten(-2), x[..., width:]], -1)
    return _BlockRotation.apply(x, quaternion)


def _check_last(where: str, name: str, x: Tensor, size: int) -> None:
    if not isinstance(x, Tensor):
        raise DtypeError(f"{where}: {name} must be a tensor; got {type(x).__name__}.")
    if x.dim() == 0 or x.shape[-1] != size:
        raise ShapeError(
            f"{where}: the last axis of {name} must have size {size}; got shape {tuple(x.shape)}."
        )


def _accumulated(x: Tensor) -> Tensor:
    return x.to(accumulate_dtype(x.dtype))


def _blocks(x: Tensor, quaternion: Tensor) -> Tensor:
    count = quaternion.shape[-2]
    return x[..., : 4 * count].unflatten(-1, (count, 4))


def _components(x: Tensor) -> Tensor:
    """Lay (..., 4) out as four contiguous tensors: strided products cost twice the time."""
    return _accumulated(x).movedim(-1, 0).contiguous()


class _Product(torch.autograd.Function):
    """The product of equal shapes; saves its factors only."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        parts_a, parts_b = _components(a), _components(b)
        parts = torch.empty_like(parts_a)
        product_into(parts, parts_a, parts_b)
        return torch.empty_like(a, memory_format=torch.contiguous_format).copy_(
            parts.movedim(0, -1)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, tangent_a: Tensor, tangent_b: Tensor) -> Tensor:
        a, b = ctx.saved_tensors
        return _Product.apply(tangent_a, b) + _Product.apply(a, tangent_b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        wants_a, wants_b = ctx.needs_input_grad
        return (
            _Product.apply(grad, quaternion_conjugate(b)) if wants_a else None,
            _Product.apply(quaternion_conjugate(a), grad) if wants_b else None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, Any], a: Tensor, b: Tensor) -> Any:
        a, b = (
            mapped_first(x, dim, info.batch_size, 0) for x, dim in zip((a, b), in_dims, strict=True)
        )
        return _Product.apply(a, b), 0


class _BlockRotation(torch.autograd.Function):
    """The rotation of blocks, written straight into its result; saves its arguments only."""

    @staticmethod
    def forward(x: Tensor, quaternion: Tensor) -> Tensor:
        parts = _components(_blocks(x, quaternion))
        turned = torch.empty_like(parts)
        product_into(turned, _components(quaternion), parts, conjugate_a=True)
        out = torch.empty_like(x)
        _blocks(out, quaternion).movedim(-1, 0).copy_(turned)
        width = 4 * quaternion.shape[-2]
        out[..., width:].copy_(x[..., width:])
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, tangent_x: Tensor, tangent_quaternion: Tensor) -> Tensor:
        x, quaternion = ctx.saved_tensors
        width = 4 * quaternion.shape[-2]
        # Linear in both; what is not turned does not depend on the quaternion.
        change = _BlockRotation.apply(x[..., :width], tangent_quaternion)
        rest = torch.zeros_like(x[..., width:])
        return _BlockRotation.apply(tangent_x, quaternion) + torch.cat([change, rest], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, quaternion = ctx.saved_tensors
        grad_x = _BlockRotation.apply(grad, quaternion_conjugate(quaternion))
        grad_quaternion = None
        if ctx.needs_input_grad[1]:
            grad_block = quaternion_conjugate(_accumulated(_blocks(grad, quaternion)))
            product = _Product.apply(_accumulated(_blocks(x, quaternion)), grad_block)
            grad_quaternion = product.sum_to_size(quaternion.shape)
        return grad_x, grad_quaternion

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, Any], x: Tensor, quaternion: Tensor) -> Any:
        x = mapped_first(x, in_dims[0], info.batch_size, 0)
        if in_dims[1] is not None:
            quaternion = mapped_first(quaternion, in_dims[1], info.batch_size, x.dim() + 1)
        return _BlockRotation.apply(x, quaternion), 0
