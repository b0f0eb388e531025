"""Laws of the running product of quaternions: any way of scanning is the token loop."""

import math

import pytest
import torch
from rotation_cases import BORDERS, LENGTHS, loop, unit

from anymamba.ops.rotation import cumulate_angles, cumulate_quaternions
from anymamba.ops.rotation.quaternion_scan import quaternion_scan
from laws import assert_same, assert_ways_agree, randn


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
