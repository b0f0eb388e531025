"""Derivatives of the SSD core: of every input, first and second, mapped, and asked for in part."""

import pytest
import torch
from ssd_core_cases import ALGORITHMS, KINDS, WEIGHTS, by, core_inputs, reference, weighed
from torch.autograd import gradcheck, gradgradcheck

from kernels import dtype_of
from laws import assert_same, assert_ways_agree


@pytest.mark.parametrize("kind", ALGORITHMS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_gradcheck(kind, weights):
    """Hand-written and automatic gradients match finite differences."""
    inputs = weighed(core_inputs(1, 5, 2, 2, 1, 2, 2), weights)
    assert gradcheck(by(kind, 4, weights == "strict"), [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize("kind", ALGORITHMS)
@pytest.mark.parametrize("packed", [False, True])
def test_double_backward(kind, packed):
    """Second derivatives match finite differences on every path."""
    cu_seqlens = torch.tensor([0, 2, 2, 3]) if packed else None
    inputs = core_inputs(1, 3, 1, 2, 1, 2, 2, rows=3 if packed else None)
    inputs = [x.requires_grad_() for x in inputs]
    assert gradgradcheck(by(kind, 2, False, cu_seqlens), inputs)


@pytest.mark.parametrize("packed", [False, True])
def test_vmap_equals_loop(kind, packed):
    """A mapped axis gives each slice its own result, forward and backward, in_dims included."""
    cu_seqlens = torch.tensor([0, 2, 2, 7]) if packed else None
    rows = 3 if packed else None
    stacks = [
        core_inputs(1 if packed else 2, rows=rows, dtype=dtype_of(kind)),
        core_inputs(1 if packed else 2, rows=rows, dtype=dtype_of(kind)),
    ]
    stacks[1] = [x.flip(1) for x in stacks[1]]
    way = by(kind, 3, False, cu_seqlens)

    def loss(*tensors):
        y, final = way(*tensors)
        return y.square().sum() + final.sin().sum()

    mapped = [torch.stack(pair, 1) for pair in zip(*stacks, strict=True)]
    mapped[3] = stacks[0][3]
    in_dims = (1, 1, 1, None, 1, 1, 1)
    y, final = torch.func.vmap(way, in_dims)(*mapped)
    grads = torch.func.vmap(torch.func.grad(loss, tuple(range(7))), in_dims)(*mapped)
    for place, stack in enumerate(stacks):
        slices = [*stack[:3], stacks[0][3], *stack[4:]]
        want_y, want_final = way(*slices)
        assert_same(want_y, y[place])
        assert_same(want_final, final[place])
        for want, got in zip(torch.func.grad(loss, tuple(range(7)))(*slices), grads, strict=True):
            assert_same(want, got[place], "grad")


def test_gradient_reaches_through_either_output_alone(kind):
    """An upstream gradient on y only, or on the final state only, is enough."""
    for place in (0, 1):
        way = lambda *x, place=place: (by(kind, 3)(*x)[place],)  # noqa: E731
        want = lambda *x, place=place: (reference()(*x)[place],)  # noqa: E731
        assert_ways_agree(want, way, core_inputs(dtype=dtype_of(kind)))


@pytest.mark.parametrize("wanted", [(0,), (1,), (4,), (2, 3), (5,), (6,)])
def test_gradient_of_some_inputs_only(kind, wanted):
    """Any subset of the inputs may ask for a gradient."""
    grads = []
    for way in (reference(), by(kind, 3)):
        inputs = core_inputs(dtype=dtype_of(kind))
        for place in wanted:
            inputs[place].requires_grad_()
        y, final = way(*inputs)
        grads.append(torch.autograd.grad(y.sum() + final.sin().sum(), [inputs[i] for i in wanted]))
    for want, got in zip(*grads, strict=True):
        assert_same(want, got, "grad")


def test_one_tensor_may_fill_two_arguments(kind):
    """One tensor as keys and queries, one as both weights: compiled too, gradients summed."""
    v, da, k, _, initial, scale, _ = core_inputs(dtype=dtype_of(kind))
    way = by(kind, 4)
    both = lambda v, k, w: way(v, da, k, k, initial, w, w)  # noqa: E731
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    want = lambda v, k, w: reference()(v, da, k, k, initial, w, w)  # noqa: E731
    assert_ways_agree(want, both, [v, k, scale])
    assert_ways_agree(both, compiled, [v, k, scale])


@pytest.mark.parametrize("kind", KINDS[2:], indirect=True)
def test_changing_an_input_before_backward_is_noticed(kind):
    """The recomputing backward refuses inputs that changed since the forward."""
    inputs = [x.requires_grad_() for x in core_inputs(dtype=dtype_of(kind))]
    held = inputs[0].clone()
    y, _ = by(kind, 3)(held, *inputs[1:])
    with torch.no_grad():
        held.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
