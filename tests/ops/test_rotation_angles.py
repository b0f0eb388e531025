"""Laws of the complex rotation: angles, their running sum, and rotated pairs."""

import math

import pytest
import torch
from rotation_cases import BORDERS, LENGTHS, turned

from anymamba.ops.rotation import (
    PAIRINGS,
    angle_increment,
    cumulate_angles,
    cumulate_angles_reference,
    rotate_pairs,
    wrap_angle,
)
from golden import check_golden, golden_case
from laws import assert_same, assert_ways_agree, rand, randn


def test_wrapped_angle_is_small_and_equal_under_cosine():
    """Wrapping keeps cosine and sine, and lands in [-pi, pi]."""
    angle = randn(1000, seed=1, scale=1e3)
    wrapped = wrap_angle(angle)
    assert float(wrapped.abs().max()) <= math.pi + 1e-12
    assert_same(angle.cos(), wrapped.cos())
    assert_same(angle.sin(), wrapped.sin())


def test_wrapping_float32_loses_nothing():
    """The turns are taken off to the rounding of the result, not of turns times a rounded 2 pi."""
    angle = randn(1000, seed=1, scale=1e4, dtype=torch.float32)
    exact = angle.double() - 2 * math.pi * (angle.double() / (2 * math.pi)).round()
    gap = wrap_angle(angle).double() - exact
    gap -= 2 * math.pi * (gap / (2 * math.pi)).round()
    assert float(gap.abs().max()) < 1e-6


def test_wrap_has_gradient_exactly_one():
    """The whole turns are constants of differentiation."""
    angle = randn(50, seed=2, scale=20).requires_grad_()
    (grad,) = torch.autograd.grad(wrap_angle(angle).sum(), angle)
    assert torch.equal(grad, torch.ones_like(grad))


def test_range_one_is_dt_pi_tanh():
    """The increment is dt * range * pi * tanh(raw), for shared and for per-head channels."""
    dt = rand(2, 5, 3, 1, seed=2)
    for heads in (1, 3):
        raw = randn(2, 5, heads, 4, seed=1)
        expected = dt * math.pi * torch.tanh(raw)
        assert_same(expected, angle_increment(raw, dt))
        assert_same(1.37 * expected, angle_increment(raw, dt, 1.37))


def test_half_turn_needs_range_two_to_keep_a_gradient():
    """A half turn is a gradient desert at range 1 and ordinary ground at range 2."""
    one = torch.ones(1, 1)
    at_end = torch.full((1, 1), 20.0, requires_grad=True)
    (grad,) = torch.autograd.grad(angle_increment(at_end, one, 1.0).sum(), at_end)
    assert float(grad) == 0.0
    middle = torch.full((1, 1), math.atanh(0.5), requires_grad=True)
    half_turn = angle_increment(middle, one, 2.0)
    assert float(half_turn.detach()) == pytest.approx(math.pi, rel=1e-6)
    (grad,) = torch.autograd.grad(half_turn.sum(), middle)
    assert float(grad) > 0.1


@pytest.mark.parametrize("length", [*LENGTHS, 1100])
def test_blocked_angles_equal_token_loop(length):
    """Values, final angles and gradients of both inputs equal one addition per token."""
    inputs = randn(2, length, 3, 2, seed=1), randn(2, 3, 2, seed=2, scale=4)
    assert_ways_agree(
        lambda *x: turned(cumulate_angles_reference(*x)),
        lambda *x: turned(cumulate_angles(*x)),
        inputs,
    )


def test_split_angles_equal_whole():
    """Two calls joined by the final angle give what one call gives."""
    inputs = randn(2, 65, 3, 2, seed=1), randn(2, 3, 2, seed=2)

    def split(increment, initial):
        head = cumulate_angles(increment[:, :23], initial)
        tail = cumulate_angles(increment[:, 23:], head.final_bha)
        return turned((torch.cat([head.angle_bsha, tail.angle_bsha], 1), tail.final_bha))

    assert_ways_agree(lambda *x: turned(cumulate_angles(*x)), split, inputs)


@pytest.mark.parametrize("borders", BORDERS)
def test_packed_angles_equal_separate_calls(borders):
    """Each packed sequence behaves as if it were alone, empty ones included."""
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    rows = len(borders) - 1
    inputs = randn(1, 65, 3, 2, seed=1), randn(rows, 3, 2, seed=2, scale=4)
    assert_ways_agree(
        lambda *x: turned(cumulate_angles_reference(*x, cu_seqlens=cu_seqlens)),
        lambda *x: turned(cumulate_angles(*x, cu_seqlens=cu_seqlens)),
        inputs,
    )


def test_final_angle_is_wrapped():
    """The returned angle lies in [-pi, pi], for empty sequences too, and inner ones stay small."""
    increment = rand(1, 5000, 1, 2, seed=1, high=3)
    dense = cumulate_angles(increment, torch.full((1, 1, 2), 9.0).double())
    assert float(dense.final_bha.abs().max()) <= math.pi
    assert float(dense.angle_bsha.abs().max()) <= 32 * 3 + math.pi
    borders = torch.tensor([0, 0, 5000])
    packed = cumulate_angles(increment, torch.full((2, 1, 2), 9.0).double(), cu_seqlens=borders)
    assert float(packed.final_bha.abs().max()) <= math.pi


@pytest.mark.parametrize("period", [1, 32, 1_000_000])
@pytest.mark.parametrize("packed", [False, True])
def test_a_million_tokens_keep_their_angle(packed, period):
    """Float32 stays within 1e-5 of float64 over a million tokens, random or all alike."""
    increment = rand(1, period, 1, 2, seed=1, high=0.628, dtype=torch.float32)
    increment = increment.repeat(1, 1_000_000 // period, 1, 1)
    initial = torch.zeros(1, 1, 2)
    borders = torch.tensor([0, 1_000_000]) if packed else None
    exact = increment.double().cumsum(1)
    gap = cumulate_angles(increment, initial, cu_seqlens=borders).angle_bsha.double() - exact
    gap -= 2 * math.pi * (gap / (2 * math.pi)).round()
    assert float(gap.abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_official_angles(dtype):
    """Increments and their sum equal the official ones modulo turns; gradients exactly."""
    case = golden_case("ops/norms_activations", "angle_dt")
    inputs = case.cast(dtype)
    dt_bsh1 = inputs["dt"].transpose(1, 2).unsqueeze(-1)
    increment = angle_increment(inputs["angle"], dt_bsh1)
    angle = cumulate_angles(increment, torch.zeros(1, 2, 3, dtype=dtype)).angle_bsha
    check_golden(case, inputs, {"cumsum_unwrapped": angle}, angles=("cumsum_unwrapped",))


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("lead", [(), (1,), (5, 1), (2, 5, 1), (2, 5, 3)])
def test_pairs_rotate_as_complex_numbers(pairing, count, lead):
    """Rotation is multiplication by exp(i angle), pair by pair; other entries pass through."""

    def expected(x, angle):
        pairs = x.unflatten(-1, (4, 2)) if pairing == "interleaved" else x.unflatten(-1, (2, 4)).mT
        number = torch.view_as_complex(pairs.contiguous())
        angle = torch.nn.functional.pad(angle, (0, 4 - count))
        pairs = torch.view_as_real(number * torch.polar(torch.ones_like(angle), angle))
        return (pairs.flatten(-2) if pairing == "interleaved" else pairs.mT.flatten(-2),)

    inputs = randn(2, 5, 3, 8, seed=1), randn(*lead, count, seed=2, scale=3)
    assert_ways_agree(expected, lambda *x: (rotate_pairs(*x, pairing),), inputs)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_pair_rotation_has_two_derivatives(pairing):
    """First and second derivatives equal finite differences in float64."""
    inputs = randn(2, 3, 6, seed=1), randn(2, 1, 2, seed=2)
    inputs = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *x: rotate_pairs(*x, pairing), inputs)
    assert torch.autograd.gradgradcheck(lambda *x: rotate_pairs(*x, pairing), inputs)


def test_pairs_with_the_same_turn_keep_their_inner_product():
    """Only the difference of two angles is seen by an inner product."""
    u, w = randn(7, 8, seed=1), randn(7, 8, seed=2)
    a, b = randn(7, 4, seed=3), randn(7, 4, seed=4)
    for pairing in PAIRINGS:
        expected = (rotate_pairs(u, a - b, pairing) * w).sum(-1)
        actual = (rotate_pairs(u, a, pairing) * rotate_pairs(w, b, pairing)).sum(-1)
        assert_same(expected, actual)
