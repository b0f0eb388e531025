"""Laws of the rotations: angles and pairs, quaternions and blocks, and both running scans."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from anymamba.errors import (
    BackendError,
    ConfigError,
    DeviceError,
    DtypeError,
    NonFiniteError,
    PackingError,
    ShapeError,
)
from anymamba.ops.rotation import (
    PAIRINGS,
    angle_increment,
    bound_rotation_vector,
    cumulate_angles,
    cumulate_angles_reference,
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
    wrap_angle,
)
from anymamba.ops.rotation.quaternion_scan import quaternion_scan
from anymamba.settings import override
from golden import check_golden, golden_case
from laws import assert_same, assert_ways_agree, rand, randn

LENGTHS = (1, 2, 8, 9, 63, 64, 65, 600)
BORDERS = (
    (0, 65),
    (0, 0, 1, 40, 40, 65),
    (0, 16, 32, 64, 65),
    (0, 65, 65),
    (0, 0, 0, 65),
    tuple(range(66)),
)
tracing = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def unit(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return random unit quaternions of any direction."""
    q = randn(*shape, 4, seed=seed)
    return (q / q.norm(dim=-1, keepdim=True)).to(dtype)


def turned(scan) -> tuple[Tensor, ...]:
    """Compare angles through their sine and cosine: raw values may differ by whole turns."""
    return tuple(f(x) for x in scan for f in (torch.cos, torch.sin))


def loop(increment: Tensor, initial: Tensor, cu_seqlens: Tensor | None = None):
    """Run the quaternion scan token by token."""
    return cumulate_quaternions(increment, initial, impl="reference", cu_seqlens=cu_seqlens)


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


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scan_equals_token_loop(length, dtype):
    """Values, final rotation and gradients of both inputs equal one product per token."""
    inputs = unit(2, length, 3, 2, seed=1, dtype=dtype), randn(2, 3, 2, 4, seed=2, dtype=dtype)
    assert_ways_agree(loop, cumulate_quaternions, inputs)


def test_long_rows_use_long_chunks():
    """Beyond 4096 tokens the chunks are longer; the results are the same."""
    inputs = unit(1, 4100, 1, 1, seed=1), unit(1, 1, 1, seed=2)
    assert_ways_agree(loop, cumulate_quaternions, inputs)


def test_adjoint_equals_autograd_of_doubling():
    """The hand-written backward equals autograd, for increments of any length too."""
    inputs = randn(2, 13, 2, 2, 4, seed=1, scale=0.6), randn(2, 2, 2, 4, seed=2)
    assert_ways_agree(
        lambda *x: quaternion_scan.composite(*x, None),
        lambda *x: quaternion_scan(*x, None),
        inputs,
    )


@pytest.mark.parametrize("borders", [None, (0, 0, 9, 10)])
def test_scan_has_two_derivatives(borders):
    """First and second derivatives equal finite differences in float64."""
    cu_seqlens = None if borders is None else torch.tensor(borders)
    rows = 1 if borders is None else len(borders) - 1
    inputs = [unit(1, 10, 1, 1, seed=1).requires_grad_(), randn(rows, 1, 1, 4, seed=2)]
    inputs[1].requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: quaternion_scan(*x, cu_seqlens), inputs)
    assert torch.autograd.gradgradcheck(
        lambda *x: quaternion_scan(*x, cu_seqlens), inputs, fast_mode=True
    )


@pytest.mark.parametrize("which", [0, 1])
def test_each_output_carries_gradient_alone(which):
    """The gradient is right when only the rotations, or only the final one, is used."""
    inputs = unit(2, 21, 2, 2, seed=1), unit(2, 2, 2, seed=2)
    assert_ways_agree(
        lambda *x: (loop(*x)[which],), lambda *x: (cumulate_quaternions(*x)[which],), inputs
    )


def test_split_scan_equals_whole():
    """Two calls joined by the final rotation give what one call gives."""
    inputs = unit(2, 65, 3, 2, seed=1), randn(2, 3, 2, 4, seed=2)

    def split(increment, initial):
        head = cumulate_quaternions(increment[:, :23], initial)
        tail = cumulate_quaternions(increment[:, 23:], head.final_bhj4)
        return torch.cat([head.quaternion_bshj4, tail.quaternion_bshj4], 1), tail.final_bhj4

    assert_ways_agree(cumulate_quaternions, split, inputs)


@pytest.mark.parametrize("borders", BORDERS)
def test_packed_scan_equals_separate_calls(borders):
    """Each packed sequence behaves as if it were alone, empty ones included."""
    cu_seqlens = torch.tensor(borders)
    inputs = unit(1, 65, 3, 2, seed=1), randn(len(borders) - 1, 3, 2, 4, seed=2)
    assert_ways_agree(
        lambda *x: loop(*x, cu_seqlens),
        lambda *x: cumulate_quaternions(*x, cu_seqlens=cu_seqlens),
        inputs,
    )


@pytest.mark.parametrize("kind", ["angle", "quaternion"])
@pytest.mark.parametrize("place", [0, 15, 30, 70, 99])
@pytest.mark.parametrize("doubled", [False, True])
def test_nan_stays_in_its_sequence(kind, place, doubled):
    """A NaN in one packed sequence reaches no value and no gradient of another."""
    borders = torch.tensor([0, 16, 16, 60, 100])
    shape, scan = (
        ((2, 2), cumulate_angles) if kind == "angle" else ((2, 2, 4), cumulate_quaternions)
    )
    increment, initial = randn(1, 100, *shape, seed=1), randn(4, *shape, seed=2)
    increment[0, place] = math.nan
    leaves = [increment.requires_grad_(), initial.requires_grad_()]
    values, finals = scan(*leaves, cu_seqlens=borders)
    loss = values.sin().sum() + finals.sin().sum()
    grads = torch.autograd.grad(loss, leaves, create_graph=doubled)
    if doubled:
        loss = sum(grad.square().sum() for grad in grads)
        grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    owner = sum(place >= border for border in (16, 60))
    ill_row = (0, 2, 3)[owner]
    start, end = int(borders[ill_row]), int(borders[ill_row + 1])
    for tokens in (values, grads[0]):
        assert bool(tokens[0, :start].isfinite().all())
        assert bool(tokens[0, end:].isfinite().all())
    assert bool(values[0, place].isnan().all())
    for rows in (finals, grads[1]):
        assert bool(rows[torch.arange(4) != ill_row].isfinite().all())
    assert bool(finals[ill_row].isnan().all())


def test_one_axis_quaternions_add_their_angles():
    """About one axis the running product is the running sum of half angles."""
    angle = randn(2, 20, 1, 1, seed=1)
    zero = torch.zeros_like(angle)
    q = torch.stack([angle.cos(), angle.sin(), zero, zero], -1)
    identity = torch.tensor([1.0, 0, 0, 0]).double().expand(2, 1, 1, 4)
    total = angle.cumsum(1)
    expected = torch.stack([total.cos(), total.sin(), zero, zero], -1)
    assert_same(expected, cumulate_quaternions(q, identity).quaternion_bshj4)


def test_rotations_stay_unit_over_512_steps():
    """Every prefix and the final rotation have length 1, even from an initial one that has not."""
    q = unit(1, 512, 2, 2, seed=1, dtype=torch.float32)
    scan = cumulate_quaternions(q, randn(1, 2, 2, 4, seed=2, dtype=torch.float32))
    for x in scan:
        assert float((x.norm(dim=-1) - 1).abs().max()) < 1e-6


def test_initial_rotation_matters():
    """A different initial rotation changes the result: the carry is not ignored."""
    q = unit(1, 20, 1, 1, seed=1)
    first, second = (
        cumulate_quaternions(q, unit(1, 1, 1, seed=seed)).quaternion_bshj4 for seed in (2, 3)
    )
    assert float((first - second).abs().min(1).values.max()) > 1e-3


def test_batch_rows_are_independent():
    """A row alone gives what it gives in a batch."""
    q, initial = unit(3, 33, 2, 2, seed=1), unit(3, 2, 2, seed=2)
    angle, start = randn(3, 33, 2, 2, seed=3), randn(3, 2, 2, seed=4)
    for row in range(3):
        one = slice(row, row + 1)
        whole, alone = cumulate_quaternions(q, initial), cumulate_quaternions(q[one], initial[one])
        assert torch.equal(whole.quaternion_bshj4[one], alone.quaternion_bshj4)
        assert torch.equal(
            cumulate_angles(angle, start).angle_bsha[one],
            cumulate_angles(angle[one], start[one]).angle_bsha,
        )


def test_scan_saves_its_inputs_only():
    """Between forward and backward the operator keeps nothing but what it was given."""
    increment = unit(1, 40, 2, 2, seed=1).requires_grad_()
    initial = unit(1, 2, 2, seed=2).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, id):
        quaternion_scan(increment, initial, None)
    assert set(kept) == {increment.data_ptr(), initial.data_ptr()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_compute_in_float32(dtype):
    """Half-type activations give float32 angles and rotations, and results of their own dtype."""
    raw, dt = randn(2, 9, 1, 4, seed=1, dtype=dtype), rand(2, 9, 3, 1, seed=2, dtype=torch.float32)
    increment = angle_increment(raw, dt)
    assert increment.dtype == torch.float32
    assert_same(angle_increment(raw.float(), dt), increment)
    raw3 = randn(2, 9, 3, 2, 3, seed=3, dtype=dtype)
    assert quaternion_increment(raw3, dt[..., 0]).dtype == torch.float32
    assert (
        cumulate_angles(increment.to(dtype), torch.zeros(2, 3, 4)).final_bha.dtype is torch.float32
    )
    angle = randn(2, 9, 1, 4, seed=4, dtype=torch.float32)
    q = unit(2, 9, 1, 2, seed=5, dtype=torch.float32)
    ways = (
        (lambda x, t: rotate_pairs(x, t, "interleaved"), angle),
        (lambda x, t: rotate_pairs(x, t, "half_split"), angle),
        (rotate_blocks, q),
    )
    head = randn(2, 9, 3, 12, seed=7, dtype=dtype)
    for way, turn in ways:
        results = []
        for wide in (True, False):
            x = randn(2, 9, 3, 12, seed=6, dtype=dtype)
            leaves = [(x.float() if wide else x).requires_grad_(), turn.clone().requires_grad_()]
            out = way(*leaves)
            results.append((out, *torch.autograd.grad((out * head.to(out)).sum(), leaves)))
        assert results[1][0].dtype == dtype
        assert results[1][1].dtype == dtype
        assert results[1][2].dtype == torch.float32
        assert torch.equal(results[0][0].to(dtype), results[1][0])
        assert torch.equal(results[0][1].to(dtype), results[1][1])
        assert_same(results[0][2], results[1][2], "grad")


def test_autocast_does_not_narrow_the_scans():
    """Under bfloat16 autocast, float32 inputs are still computed in float32."""
    q, initial = unit(1, 20, 2, 2, seed=1, dtype=torch.float32), torch.ones(1, 2, 2, 4)
    angle, start = randn(1, 20, 2, 2, seed=3, dtype=torch.float32), torch.zeros(1, 2, 2)
    expected = *cumulate_quaternions(q, initial), *cumulate_angles(angle, start)
    with torch.autocast("cpu", torch.bfloat16):
        actual = *cumulate_quaternions(q, initial), *cumulate_angles(angle, start)
    for want, got in zip(expected, actual, strict=True):
        assert torch.equal(want, got)


@pytest.mark.parametrize("packed", [False, True])
def test_meta_tensors_give_shapes(packed):
    """Every function runs on tensors without data."""
    meta = {"device": "meta"}
    borders = torch.zeros(4, dtype=torch.int64, **meta) if packed else None
    rows = 3 if packed else 1
    x, q = torch.empty(1, 50, 2, 8, **meta), torch.empty(1, 50, 2, 2, 4, **meta)
    angle = torch.empty(1, 50, 2, 3, **meta)
    scan = cumulate_angles(angle, torch.empty(rows, 2, 3, **meta), cu_seqlens=borders)
    assert scan.angle_bsha.shape == (1, 50, 2, 3)
    assert scan.final_bha.shape == (rows, 2, 3)
    scan = cumulate_quaternions(q, torch.empty(rows, 2, 2, 4, **meta), cu_seqlens=borders)
    assert scan.quaternion_bshj4.shape == q.shape
    assert scan.final_bhj4.shape == (rows, 2, 2, 4)
    for turned in (rotate_pairs(x, angle, "half_split"), rotate_blocks(x, q)):
        assert turned.shape == x.shape
    assert quaternion_increment(torch.empty(5, 2, 2, 3, **meta), x[0, :5, :, 0]).shape[-1] == 4


@pytest.mark.parametrize("borders", [None, (0, 0, 4, 9)])
def test_vmap_equals_a_loop(borders):
    """Mapping a scan over an extra axis equals calling it for each entry, gradients too."""
    cu_seqlens = None if borders is None else torch.tensor(borders)
    rows = 1 if borders is None else len(borders) - 1
    q, initial = unit(3, 1, 9, 2, 1, seed=1), unit(rows, 2, 1, seed=2)

    def one(q, initial):
        return torch.cat(
            [x.flatten() for x in cumulate_quaternions(q, initial, cu_seqlens=cu_seqlens)]
        )

    def grad(q, initial):
        return torch.func.grad(lambda q: (one(q, initial) ** 3).sum())(q)

    for way in (one, grad):
        expected = torch.stack([way(x, initial) for x in q])
        assert_same(expected, torch.vmap(way, in_dims=(0, None))(q, initial))


@pytest.mark.parametrize("mapped", [(0, 0), (0, None), (None, 0), (1, 0)])
def test_vmap_of_a_rotation_equals_a_loop(mapped):
    """Mapping a rotation over any of its arguments equals a loop, gradients too."""
    ways = (
        (lambda x, t: rotate_pairs(x, t, "interleaved"), (2,)),
        (lambda x, t: rotate_pairs(x, t, "half_split"), (2,)),
        (rotate_blocks, (2, 4)),
    )
    for way, inner in ways:
        x = randn(3, 3, 5, 8, seed=1) if mapped[0] is not None else randn(3, 5, 8, seed=1)
        turn = randn(3, 5, *inner, seed=2) if mapped[1] is not None else randn(5, *inner, seed=2)

        def grads(x, turn, way=way):
            return torch.func.grad(lambda *a: (way(*a) ** 3).sum(), (0, 1))(x, turn)

        def both(x, turn, way=way):
            return way(x, turn), *grads(x, turn)

        pairs = [
            (
                x if mapped[0] is None else x.select(mapped[0], i),
                turn if mapped[1] is None else turn[i],
            )
            for i in range(3)
        ]
        expected = [torch.stack(parts) for parts in zip(*(both(*p) for p in pairs), strict=True)]
        for want, got in zip(expected, torch.vmap(both, in_dims=mapped)(x, turn), strict=True):
            assert_same(want, got)


@pytest.mark.parametrize("borders", [None, (0, 0, 4, 9)])
def test_operator_registration_is_sound(borders):
    """Schema, fake and body agree, for the forward and for the backward."""
    cu_seqlens = None if borders is None else torch.tensor(borders)
    rows = 2 if borders is None else len(borders) - 1
    inputs = unit(2 if borders is None else 1, 9, 2, 3, seed=1), unit(rows, 2, 3, seed=2)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(quaternion_scan.fwd_op, (*inputs, cu_seqlens), test_utils=tests)
    args = (*[torch.ones_like(x) for x in inputs], *inputs, cu_seqlens)
    torch.library.opcheck(quaternion_scan.bwd_op, args, test_utils=tests)


def counting_backend(graphs: list):
    """Return a compiler backend that notes each graph it is given."""
    eager = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph, inputs):
        graphs.append(graph)
        return eager(graph, inputs)

    return backend


def complex_way(raw, dt, initial, x, cu_seqlens=None):
    """Run the whole complex rotation."""
    scan = cumulate_angles(angle_increment(raw, dt), initial, cu_seqlens=cu_seqlens)
    x = rotate_pairs(x, scan.angle_bsha, "interleaved")
    x = rotate_pairs(x, scan.angle_bsha, "half_split")
    return x, scan.final_bha.cos(), scan.final_bha.sin()


def quaternion_way(raw, dt, initial, x, cu_seqlens=None):
    """Run the whole quaternion rotation."""
    scan = cumulate_quaternions(quaternion_increment(raw, dt), initial, cu_seqlens=cu_seqlens)
    return rotate_blocks(x, scan.quaternion_bshj4), scan.final_bhj4


@tracing
@pytest.mark.parametrize("kind", ["complex", "quaternion"])
def test_compiles_once_for_many_lengths(kind):
    """torch.compile(fullgraph) makes one graph for the first length and one for all others."""
    torch._dynamo.reset()
    graphs = []
    way, wide, inner = (
        (complex_way, (1, 2), (3, 2))
        if kind == "complex"
        else (quaternion_way, (3, 2, 3), (3, 2, 4))
    )
    compiled = torch.compile(way, fullgraph=True, backend=counting_backend(graphs))
    for length in (9, 4, 32, 64, 65, 1100):
        dt = rand(2, length, 3, *[1] * (kind == "complex"), seed=2)
        raw, x = randn(2, length, *wide, seed=1), randn(2, length, 3, 12, seed=4)
        assert_ways_agree(way, compiled, (raw, dt, randn(2, *inner, seed=3), x))
    assert len(graphs) == 2
    torch._dynamo.reset()


@tracing
@pytest.mark.parametrize("kind", ["complex", "quaternion"])
def test_compiled_packed_equals_eager(kind):
    """A packed call compiles without a break and gives the eager results."""
    torch._dynamo.reset()
    way, wide, inner = (
        (complex_way, (1, 2), (3, 2))
        if kind == "complex"
        else (quaternion_way, (3, 2, 3), (3, 2, 4))
    )
    compiled = torch.compile(way, fullgraph=True, backend="aot_eager")
    borders = torch.tensor([0, 3, 3, 65])
    dt = rand(1, 65, 3, *[1] * (kind == "complex"), seed=2)
    inputs = randn(1, 65, *wide, seed=1), dt, randn(3, *inner, seed=3), randn(1, 65, 3, 12, seed=4)
    assert_ways_agree(lambda *x: way(*x, borders), lambda *x: compiled(*x, borders), inputs)
    with torch.no_grad():
        assert_same(way(*inputs, borders)[0], compiled(*inputs, borders)[0])
    torch._dynamo.reset()


def test_rejects_wrong_pairs():
    """Odd widths, too many angles, axes that do not broadcast and unknown pairings are refused."""
    x = torch.zeros(2, 5, 8)
    with pytest.raises(ShapeError, match="even size"):
        rotate_pairs(x[..., :7], x[..., :2], "interleaved")
    with pytest.raises(ShapeError, match="at most one entry per pair"):
        rotate_pairs(x, x[..., :5], "interleaved")
    with pytest.raises(ShapeError, match="must broadcast"):
        rotate_pairs(x, torch.zeros(3, 5, 2), "interleaved")
    with pytest.raises(ShapeError, match="must broadcast"):
        rotate_pairs(x, torch.zeros(1, 2, 5, 2), "interleaved")
    with pytest.raises(ConfigError, match="pairing"):
        rotate_pairs(x, x[..., :2], "neox")
    with pytest.raises(DtypeError, match="angle"):
        rotate_pairs(x, x[..., :2].double(), "interleaved")
    with pytest.raises(DeviceError, match="angle"):
        rotate_pairs(x, x[..., :2].to("meta"), "interleaved")
    with pytest.raises(DtypeError, match="tensors"):
        rotate_pairs(x, 0.5, "interleaved")


def test_rejects_wrong_quaternions():
    """Axes that are not 4 (or 3) and blocks that do not fit are refused."""
    x = torch.zeros(2, 5, 8)
    with pytest.raises(ShapeError, match="size 4"):
        rotate_blocks(x, torch.zeros(2, 5, 2, 3))
    with pytest.raises(ShapeError, match="need 12 entries"):
        rotate_blocks(x, torch.zeros(2, 5, 3, 4))
    with pytest.raises(ShapeError, match="must broadcast"):
        rotate_blocks(x, torch.zeros(3, 5, 2, 4))
    with pytest.raises(ShapeError, match="size 3"):
        quaternion_increment(torch.zeros(2, 2, 4), torch.zeros(2))
    with pytest.raises(ShapeError, match="must broadcast"):
        quaternion_multiply(torch.zeros(2, 4), torch.zeros(3, 4))
    with pytest.raises(DtypeError, match="must have the dtype"):
        quaternion_multiply(torch.zeros(2, 4), torch.zeros(2, 4).double())


def test_rejects_wrong_scans():
    """Sizes, borders, dtypes and implementations that cannot be are refused with the reason."""
    q, initial = torch.ones(1, 9, 2, 2, 4), torch.ones(1, 2, 2, 4)
    angle, start = torch.ones(1, 9, 2, 2), torch.ones(1, 2, 2)
    borders = torch.tensor([0, 4, 9])
    with pytest.raises(ShapeError, match="heads"):
        cumulate_quaternions(q, initial[:, :1])
    with pytest.raises(ShapeError, match="batch"):
        cumulate_angles(angle, start.expand(2, 2, 2))
    for scan, tokens, first in (
        (cumulate_quaternions, q, initial),
        (cumulate_angles, angle, start),
    ):
        with pytest.raises(ShapeError, match="one row per packed sequence"):
            scan(tokens, first, cu_seqlens=borders)
        two = first.expand(2, *first.shape[1:])
        with pytest.raises(PackingError, match="must end at"):
            scan(tokens, two, cu_seqlens=borders - torch.tensor([0, 0, 1]))
        with pytest.raises(PackingError, match="batch must be 1"):
            scan(tokens.expand(2, *tokens.shape[1:]), two, cu_seqlens=borders)
        with pytest.raises(DtypeError, match="initial"):
            scan(tokens, first.half())
        with override(deny_nan=True), pytest.raises(NonFiniteError, match="increment"):
            scan(tokens * math.nan, first)
    with pytest.raises(BackendError, match="no native kernel exists"):
        cumulate_quaternions(q, initial, impl="native")
    with pytest.raises(ConfigError, match="impl"):
        cumulate_quaternions(q, initial, impl="fast")
