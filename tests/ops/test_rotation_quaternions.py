"""Laws of quaternions: products, increments, and rotated blocks."""

import math
from itertools import pairwise

import pytest
import torch
from rotation_cases import unit

from anymamba.ops.rotation import (
    bound_rotation_vector,
    cumulate_quaternions,
    quaternion_conjugate,
    quaternion_from_vector,
    quaternion_increment,
    quaternion_multiply,
    quaternion_normalize,
    quaternion_to_matrix,
    rotate_blocks,
    rotate_pairs,
    safe_norm,
)
from laws import assert_same, assert_ways_agree, rand, randn


def test_left_multiplication_is_an_orthogonal_matrix():
    """matrix(q) is orthogonal, multiplies like q, and quaternions do not commute."""
    a, b = unit(5, seed=1), unit(5, seed=2)
    matrix = quaternion_to_matrix(a)
    assert_same(torch.eye(4).double().expand(5, 4, 4), matrix @ matrix.mT)
    assert_same(torch.ones(5).double(), torch.linalg.det(matrix))
    product = quaternion_multiply(a, b)
    assert_same((matrix @ b.unsqueeze(-1)).squeeze(-1), product)
    assert_same(matrix @ quaternion_to_matrix(b), quaternion_to_matrix(product))
    assert float((product - quaternion_multiply(b, a)).abs().max()) > 1e-2
    identity = torch.tensor([1.0, 0, 0, 0]).double().expand(5, 4)
    assert_same(identity, quaternion_multiply(a, quaternion_conjugate(a)))


def test_product_has_two_derivatives_for_all_quaternions():
    """First and second derivatives, with broadcasting, equal finite differences."""
    inputs = [randn(2, 1, 4, seed=1).requires_grad_(), randn(3, 4, seed=2).requires_grad_()]
    assert torch.autograd.gradcheck(quaternion_multiply, inputs)
    assert torch.autograd.gradgradcheck(quaternion_multiply, inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_zero_has_a_finite_gradient(dtype):
    """Norm, bound, vector to quaternion, increment and normalisation are smooth at zero."""
    zero = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    ways = (
        safe_norm,
        lambda v: bound_rotation_vector(v, 2.0),
        quaternion_from_vector,
        lambda v: quaternion_increment(v.unsqueeze(0), torch.ones(1, dtype=dtype)),
    )
    for way in ways:
        (grad,) = torch.autograd.grad(way(zero).sum(), zero)
        assert bool(torch.isfinite(grad).all())
    identity = torch.tensor([1.0, 0, 0, 0], dtype=dtype).expand(2, 4)
    assert torch.equal(identity, quaternion_from_vector(zero).detach())
    zero = torch.zeros(2, 4, dtype=dtype, requires_grad=True)
    (grad,) = torch.autograd.grad(quaternion_normalize(zero).sum(), zero)
    assert bool(torch.isfinite(grad).all())
    assert torch.equal(torch.zeros(2, 4, dtype=dtype), quaternion_normalize(zero).detach())


def test_rotation_vector_gives_half_its_angle():
    """(2 phi, 0, 0) becomes (cos phi, sin phi, 0, 0), of unit length."""
    phi = randn(9, seed=1)
    vector = torch.stack([2 * phi, 0 * phi, 0 * phi], -1)
    expected = torch.stack([phi.cos(), phi.sin(), 0 * phi, 0 * phi], -1)
    assert_same(expected, quaternion_from_vector(vector))
    q = quaternion_from_vector(randn(9, 3, seed=2, scale=3))
    assert_same(torch.ones(9).double(), q.norm(dim=-1))


def test_bound_keeps_direction_and_grows_to_the_limit():
    """The bounded vector is parallel to its source, longer for longer sources, never too long."""
    direction = randn(20, 3, seed=1)
    direction /= direction.norm(dim=-1, keepdim=True)
    lengths = [
        bound_rotation_vector(scale * direction, 2.0).norm(dim=-1)
        for scale in (0.05, 0.5, 1.0, 3.0, 20.0)
    ]
    for short, long in pairwise(lengths):
        assert bool((long > short).all())
    assert float(lengths[-1].max()) <= 2.0 + 1e-12
    assert float(lengths[-1].min()) > 0.99 * 2.0
    for scale in (0.05, 1.0, 20.0):
        bounded = bound_rotation_vector(scale * direction, 2.0)
        assert_same(direction, bounded / bounded.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("scale", [1e3, 1e10, 1e20])
def test_huge_vectors_keep_rotating(scale):
    """Lengths whose squares overflow float32 are still bounded along their own axis."""
    direction = randn(20, 3, seed=1, dtype=torch.float32)
    vector = (scale * direction).requires_grad_()
    bounded = bound_rotation_vector(vector, 2.0)
    expected = 2 * direction / direction.norm(dim=-1, keepdim=True)
    assert_same(expected, bounded.detach())
    (grad,) = torch.autograd.grad(bounded.sum(), vector)
    assert bool(torch.isfinite(grad).all())


def test_saturated_generator_still_turns_its_axis():
    """Far beyond the bound the length has no gradient left, the axis has."""
    raw = torch.tensor([20.0, 0, 0], requires_grad=True)
    (grad,) = torch.autograd.grad(bound_rotation_vector(raw, math.pi)[1], raw)
    assert float(grad[1]) > 1e-4
    q = quaternion_increment(raw.view(1, 1, 3), torch.ones(1), 1.0)
    (grad,) = torch.autograd.grad(q[0, 0, 2], raw)
    assert float(grad[1].abs()) > 1e-4


def test_increment_is_the_bounded_vector_scaled_by_dt():
    """One norm instead of two changes neither values nor gradients, at any range."""
    inputs = randn(2, 5, 3, 2, 3, seed=1, scale=2), rand(2, 5, 3, seed=2)
    inputs[0][0, 0] *= 1e-4
    for limit in (1.0, 1.37, 2.0):

        def expected(raw, dt, limit=limit):
            bounded = bound_rotation_vector(raw, limit * math.pi)
            return (quaternion_from_vector(dt[..., None, None] * bounded),)

        def actual(raw, dt, limit=limit):
            return (quaternion_increment(raw, dt, limit),)

        assert_ways_agree(expected, actual, inputs)


def test_heads_have_their_own_axes():
    """Head 0 turns about x while head 1 turns about y, by the angle their dt says."""
    raw = torch.tensor([[[5.0, 0, 0]], [[0, 5.0, 0]]]).double()
    q = quaternion_increment(raw, torch.tensor([0.3, 0.7], dtype=torch.float64), 2.0)
    for head, (axis, dt) in enumerate([(1, 0.3), (2, 0.7)]):
        half = dt * math.pi * math.tanh(5.0)
        expected = torch.zeros(1, 4).double()
        expected[0, 0], expected[0, axis] = math.cos(half), math.sin(half)
        assert_same(expected, q[head])


@pytest.mark.parametrize("width", [8, 11])
@pytest.mark.parametrize("lead", [(), (5, 1), (2, 5, 3)])
def test_blocks_rotate_by_the_transposed_matrix(width, lead):
    """A block is multiplied by matrix(q) transposed; entries behind the blocks pass through."""

    def expected(x, q):
        blocks = x[..., :8].unflatten(-1, (2, 4))
        turned = (quaternion_to_matrix(q).mT @ blocks.unsqueeze(-1)).squeeze(-1)
        return (torch.cat([turned.flatten(-2), x[..., 8:]], -1),)

    inputs = randn(2, 5, 3, width, seed=1), randn(*lead, 2, 4, seed=2)
    assert_ways_agree(expected, lambda *x: (rotate_blocks(*x),), inputs)


def test_block_rotation_has_two_derivatives():
    """First and second derivatives equal finite differences in float64."""
    inputs = [randn(2, 2, 5, seed=1).requires_grad_(), randn(2, 1, 1, 4, seed=2).requires_grad_()]
    assert torch.autograd.gradcheck(rotate_blocks, inputs)
    assert torch.autograd.gradgradcheck(rotate_blocks, inputs)


def test_one_axis_blocks_are_interleaved_pairs():
    """About one axis a block turns as two pairs with the same angle, backwards."""
    x, angle = randn(2, 5, 8, seed=1), randn(2, 5, 2, seed=2)
    zero = torch.zeros_like(angle)
    q = torch.stack([angle.cos(), angle.sin(), zero, zero], -1)
    expected = rotate_pairs(x, -angle.repeat_interleave(2, -1), "interleaved")
    assert_same(expected, rotate_blocks(x, q))


def test_no_angles_or_blocks_is_the_identity():
    """With nothing to rotate by, the tensor itself comes back."""
    x = randn(2, 5, 8, seed=1)
    assert rotate_pairs(x, x.new_zeros(2, 5, 0), "half_split") is x
    assert rotate_blocks(x, x.new_zeros(2, 5, 0, 4)) is x


def test_factored_rotation_equals_the_rotating_recurrence():
    """Rotating B and C by the running product replaces h = a R h + b, for non-commuting R."""
    length, blocks = 11, 3
    vectors = randn(1, length, 1, blocks, 3, seed=1)
    b, c = randn(length, 4 * blocks, seed=2), randn(length, 4 * blocks, seed=3)

    def explicit(vectors, b, c):
        matrix = quaternion_to_matrix(quaternion_from_vector(vectors))[0, :, 0]
        state, out = torch.zeros(blocks, 4).double(), []
        for t in range(length):
            state = 0.9 * (matrix[t] @ state.unsqueeze(-1)).squeeze(-1) + b[t].view(blocks, 4)
            out.append((state.flatten() * c[t]).sum())
        return (torch.stack(out),)

    def factored(vectors, b, c):
        identity = torch.tensor([1.0, 0, 0, 0]).double().expand(1, 1, blocks, 4)
        cum = cumulate_quaternions(quaternion_from_vector(vectors), identity).quaternion_bshj4
        b, c = rotate_blocks(b, cum[0, :, 0]), rotate_blocks(c, cum[0, :, 0])
        age = torch.arange(length).unsqueeze(1) - torch.arange(length)
        weight = torch.where(age >= 0, 0.9 ** age.clamp(min=0).double(), 0.0)
        return (((c @ b.T) * weight).sum(1),)

    assert_ways_agree(explicit, factored, (vectors, b, c))
