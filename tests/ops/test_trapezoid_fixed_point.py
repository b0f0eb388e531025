"""The fixed point under a constant token: the limit of steps, exact near alpha = 1."""

import math

import pytest
import torch

from anymamba.ops import (
    TrapezoidCoefficients,
    TrapezoidState,
    quaternion_conjugate,
    quaternion_from_vector,
    quaternion_multiply,
    quaternion_normalize,
    rotate_blocks,
    rotate_pairs,
    trapezoid_fixed_point,
    trapezoid_step,
)
from kernels import PRECISIONS
from laws import assert_same, error_of, rand, randn


def unrolled(v, b, c, coefficients, turn, steps):
    """Feed one token `steps` times; `turn(x, n)` rotates by n increments."""
    rows, _, heads, width = v.shape
    state = TrapezoidState(
        v.new_zeros(rows, heads, width, b.shape[-1]), torch.zeros_like(b), torch.zeros_like(v)
    )
    for n in range(1, steps + 1):
        y, state = trapezoid_step(v, turn(b, n), turn(c, n), coefficients, state)
    return y


def token(m=2, a_low=0.05):
    dt = rand(1, 2, seed=1, low=0.3)
    da = -dt * rand(1, 2, seed=2, low=a_low)
    vectors = randn(1, m, 2, 3, seed=4), randn(1, m, 2, 12, seed=5), randn(1, m, 2, 12, seed=6)
    return *vectors, TrapezoidCoefficients(dt, da, rand(1, 2, seed=3))


@pytest.mark.parametrize("pairing", ["interleaved", "half_split"])
@pytest.mark.parametrize("angles", [0, 3, 6])
def test_fixed_point_is_the_unrolled_limit_of_complex_rotation(pairing, angles):
    """Feeding the same token for ever converges to the closed form, partial rotation included."""
    v, b, c, coefficients = token()
    angle = randn(1, 2, angles, seed=7) if angles else None

    def turn(x, n):
        return rotate_pairs(x, (n * angle).unsqueeze(1), pairing) if angles else x

    want = unrolled(v, b, c, coefficients, turn, 2000)
    got = trapezoid_fixed_point(v, b, c, coefficients, angle_bha=angle, pairing=pairing)
    assert_same(want, got)


@pytest.mark.parametrize("blocks", [1, 3])
def test_fixed_point_is_the_unrolled_limit_of_quaternion_rotation(blocks):
    """The same for blocks of four turned by unit quaternions."""
    v, b, c, coefficients = token()
    q = quaternion_from_vector(randn(1, 2, blocks, 3, seed=8))
    powers = [q]
    for _ in range(1999):
        powers.append(quaternion_normalize(quaternion_multiply(q, powers[-1])))

    def turn(x, n):
        return rotate_blocks(x, powers[n - 1].unsqueeze(1))

    want = unrolled(v, b, c, coefficients, turn, 2000)
    assert_same(want, trapezoid_fixed_point(v, b, c, coefficients, quaternion_bhj4=q))


@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6])
@PRECISIONS
def test_fixed_point_is_exact_near_alpha_one(gap, dtype):
    """For alpha up to 1 - 1e-6 the closed form equals a float64 linear solve, in float32 too."""
    angle = torch.tensor([0.0, 1e-5, 1e-3, 1.0])
    dt, lam = 0.7, 0.3
    da = math.log1p(-gap)
    alpha, gamma = 1 - gap, lam * dt
    beta = (1 - lam) * dt * alpha
    key = randn(8, seed=1)
    cos, sin = angle.double().cos(), angle.double().sin()
    back = torch.block_diag(
        *(torch.tensor([[c, s], [-s, c]]) for c, s in zip(cos, sin, strict=True))
    ).double()
    eye = torch.eye(8).double()
    settled = (gamma * eye + beta * back) @ torch.linalg.solve(eye - alpha * back, key)
    want = settled[:, None]
    coefficients = TrapezoidCoefficients(
        *(torch.full((8, 1), x, dtype=dtype) for x in (dt, da, lam))
    )
    got = trapezoid_fixed_point(
        torch.ones(8, 1, 1, 1, dtype=dtype),
        key.to(dtype).expand(8, 1, 1, 8).contiguous(),
        torch.eye(8, dtype=dtype).view(8, 1, 1, 8),
        coefficients,
        angle_bha=angle.to(dtype).expand(8, 1, 4),
    )
    # The solve itself is only good to the condition number 1 / gap.
    limit = 1e-15 / gap + (1e-5 if dtype == torch.float32 else 0)
    assert error_of(want, got.view(8, 1)) <= limit


def test_fixed_point_quaternion_is_exact_near_alpha_one():
    """The quaternion form agrees with the complex one about a single axis, near alpha = 1."""
    angle = torch.tensor([[[0.0, 1e-4, 0.5]]])
    coefficients = TrapezoidCoefficients(*(torch.full((1, 1), x) for x in (0.7, -1e-6, 0.3)))
    b, c, v = (
        randn(1, 1, 1, 12, seed=1).float(),
        randn(1, 1, 1, 12, seed=2).float(),
        torch.ones(1, 1, 1, 1),
    )
    half = angle.unsqueeze(-1)
    q = torch.cat([half.cos(), half.sin(), torch.zeros(1, 1, 3, 2)], -1)
    # About the first axis a block turns its two pairs by the half angle; keys use the inverse.
    want = trapezoid_fixed_point(v, b, c, coefficients, angle_bha=-angle.repeat_interleave(2, -1))
    assert_same(want, trapezoid_fixed_point(v, b, c, coefficients, quaternion_bhj4=q))
    assert_same(quaternion_conjugate(quaternion_conjugate(q)), q)


def test_gradients_pass_through_the_fixed_point():
    """The closed form is differentiable in everything, finite at a zero angle."""
    v, b, c, coefficients = token()
    angle = randn(1, 2, 3, seed=7)
    angle[0, 0, 0] = 0

    def run(v, b, c, dt, da, lam, angle):
        return trapezoid_fixed_point(v, b, c, TrapezoidCoefficients(dt, da, lam), angle_bha=angle)

    inputs = [x.clone().requires_grad_() for x in (v, b, c, *coefficients, angle)]
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("rotation", ["complex", "quaternion"])
@pytest.mark.parametrize("step", [1e-1, 1e-5, 1e-10, 1e-15, 1e-19, 1e-22, 1e-25])
def test_fixed_point_of_tiny_steps_is_that_of_float64(step, rotation):
    """However small dt, float32 has the values and gradients of float64: nothing vanishes."""
    v, b, c, coefficients = (x.float() if torch.is_tensor(x) else x for x in token())
    dt, da, lam = (x.float() for x in coefficients)
    vector = step * randn(1, 2, 3, 3, seed=8, dtype=torch.float32)
    turn = vector[..., 0] if rotation == "complex" else quaternion_from_vector(vector)

    def run(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (v, b, c, step * dt, step * da, lam, turn)]
        name = "angle_bha" if rotation == "complex" else "quaternion_bhj4"
        y = trapezoid_fixed_point(
            *leaves[:3], TrapezoidCoefficients(*leaves[3:6]), **{name: leaves[6]}
        )
        return y.detach(), torch.autograd.grad(y.square().sum(), leaves)

    want, want_grads = run(torch.float64)
    got, got_grads = run(torch.float32)
    assert_same(want, got)
    for want_grad, got_grad in zip(want_grads, got_grads, strict=True):
        assert_same(want_grad, got_grad, "grad")
