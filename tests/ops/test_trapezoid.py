"""The Mamba-3 recurrence: both pathways, steps, pieces and packs are one function."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trapezoid_cases import KINDS, PATHWAYS, how, scan, scan_inputs

from anymamba.errors import AnyMambaError, NonFiniteError
from anymamba.ops import (
    TrapezoidCoefficients,
    TrapezoidState,
    ssd_core,
    trapezoid_coefficients,
    trapezoid_fixed_point,
    trapezoid_scan,
    trapezoid_step,
)
from anymamba.settings import override
from kernels import dtype_of, running
from laws import assert_same, assert_ways_agree, randn


@settings(max_examples=40, deadline=None)
@given(
    pathway=st.sampled_from(PATHWAYS),
    kind=st.sampled_from(KINDS),
    s=st.integers(1, 20),
    m=st.integers(1, 4),
    g=st.sampled_from([1, 2, 4]),
    length=st.integers(1, 25),
)
def test_pathways_equal_reference(pathway, kind, s, m, g, length):
    """One pass, two passes and the loop over time agree on values, states and all gradients."""
    inputs = scan_inputs(s=s, m=m, g=g, dtype=dtype_of(kind))
    way = scan(pathway=pathway, **how(kind, length))
    with running(kind):
        assert_ways_agree(scan(impl="reference"), way, inputs)


@settings(max_examples=30, deadline=None)
@given(
    pathway=st.sampled_from(PATHWAYS),
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any),
    m=st.integers(1, 2),
)
def test_packed_equals_separate(pathway, kind, lengths, m):
    """In a pack, look-ahead, seed and delay restart at each border; empty sequences keep state."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    inputs = scan_inputs(1, int(cu_seqlens[-1]), m, rows=len(lengths), dtype=dtype_of(kind))
    way = scan(pathway=pathway, **how(kind, 4), cu_seqlens=cu_seqlens)
    with running(kind):
        assert_ways_agree(scan(impl="reference", cu_seqlens=cu_seqlens), way, inputs)


@pytest.mark.parametrize("length", [1, 63, 64, 65])
@pytest.mark.parametrize("pathway", PATHWAYS)
def test_steps_equal_scan(pathway, length):
    """One token at a time from a random state equals the scan."""

    def steps(v, b, c, dt, da, lam, *state):
        state = TrapezoidState(*state)
        ys = []
        for t in range(length):
            now = TrapezoidCoefficients(dt[:, t], da[:, t], lam[:, t])
            y, state = trapezoid_step(v[:, t], b[:, t], c[:, t], now, state)
            ys.append(y)
        return (torch.stack(ys, 1), *state)

    assert_ways_agree(scan(pathway=pathway), steps, scan_inputs(s=length))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pathway", PATHWAYS)
def test_half_types_are_rounded_once(pathway, kind):
    """bfloat16 tokens give the float32 result, rounded at the very end, in both pathways."""
    inputs = scan_inputs(s=40, dtype=torch.bfloat16)
    inputs = [x.float() if x.dim() == 3 else x for x in inputs]
    with running(kind):
        way = scan(pathway=pathway, **how(kind, 16))
        want, got = way(*(x.float() for x in inputs)), way(*inputs)
    assert torch.equal(want[0].bfloat16(), got[0])
    assert torch.equal(want[1], got[1])


@pytest.mark.parametrize("order", [("single", "double"), ("double", "single")])
def test_pathway_can_change_between_pieces(order):
    """A prefix by one pathway and the rest by the other equals the whole."""

    def pieces(v, b, c, dt, da, lam, *state):
        ys = []
        for pathway, (start, stop) in zip(order, [(0, 3), (3, 11)], strict=True):
            part = [x[:, start:stop] for x in (v, b, c, dt, da, lam)]
            y, *state = scan(pathway=pathway)(*part, *state)
            ys.append(y)
        return (torch.cat(ys, 1), *state)

    assert_ways_agree(scan(), pieces, scan_inputs(s=11))


def test_lambda_one_is_the_mamba2_update():
    """With lam = 1 the previous token has no weight: the scan is the plain core on dt * v."""
    inputs = scan_inputs(g=4)
    v, b, c, dt, da, lam, ssm, k, before = inputs
    coefficients = TrapezoidCoefficients(dt, da, torch.ones_like(lam))
    y, state = trapezoid_scan(v, b, c, coefficients, TrapezoidState(ssm, k, before))
    want = ssd_core(dt[:, :, None, :, None] * v, da, b, c, ssm)
    assert_same(want.y_bsmhp, y)
    assert_same(want.final_bhpr, state.ssm_bhpr)


@pytest.mark.parametrize("activation", ["heavy_tail", "softplus"])
def test_coefficients_follow_their_definition(activation):
    """Softplus, floor on the positive value, clamp of dt, sigmoid."""
    raw = randn(3, 5, 4, seed=1, scale=4.0)
    bias = randn(4, seed=2)
    got = trapezoid_coefficients(
        raw, raw.flip(0), raw.flip(1), bias, a_activation=activation, a_floor=0.3, dt_limit=(0.2, 3)
    )
    dt = torch.log1p((raw + bias).exp()).clamp(0.2, 3)
    x = raw.flip(0)
    decay = (
        torch.log1p(x.exp()) if activation == "softplus" else torch.where(x < 0, 1 / (1 - x), 1 + x)
    )
    assert_same(dt, got.dt)
    assert_same(-dt * decay.clamp(min=0.3), got.da)
    lam = 1 / (1 + (-raw.flip(1)).exp())
    assert_same(lam * dt, got.gamma)
    assert_same((1 - lam) * dt * got.da.exp(), got.beta)
    half = trapezoid_coefficients(*(raw.bfloat16(),) * 3, bias.float())
    assert {x.dtype for x in half} == {torch.float32}


def test_heavy_tail_has_slope_one_at_zero():
    """The two branches meet with slope 1, where the official formulation gives 2."""
    x = torch.zeros(1, requires_grad=True)
    zero = torch.zeros(1)
    trapezoid_coefficients(zero, x, zero, zero, a_floor=1e-3).da.backward()
    assert torch.allclose(x.grad, torch.tensor(-math.log(2.0)))


def test_rejects_bad_input():
    """Wrong pathways, states of another batch and mixed precision are refused by name."""
    v, b, c, *rest = scan_inputs()
    coefficients = TrapezoidCoefficients(*rest[:3])
    with pytest.raises(AnyMambaError, match="pathway must be one of"):
        trapezoid_scan(v, b, c, coefficients, pathway="triple")
    with pytest.raises(AnyMambaError, match="ssm_bhpr of the state must have shape"):
        trapezoid_scan(v, b, c, coefficients, TrapezoidState(rest[3][:1], *rest[4:]))
    with pytest.raises(AnyMambaError, match=r"b_bsmgr .* must accumulate"):
        trapezoid_scan(v, b.float(), c, coefficients)
    with pytest.raises(AnyMambaError, match="a_floor must be positive"):
        trapezoid_coefficients(v, v, v, v, a_floor=0.0)
    with pytest.raises(AnyMambaError, match="not both"):
        trapezoid_fixed_point(
            v[:, 0], b[:, 0], c[:, 0], coefficients, angle_bha=v, quaternion_bhj4=v
        )


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_half_types_compute_in_float32(pathway):
    """Half coefficients and states are widened first; keys and values keep their dtype."""
    inputs = [x.bfloat16() for x in scan_inputs(s=40)]
    got = scan(pathway=pathway)(*inputs)
    want = scan(pathway=pathway)(*(x.float() for x in inputs))
    assert [x.dtype for x in got] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    assert_same(want[0].bfloat16(), got[0])
    assert_same(want[1], got[1])
    coefficients = TrapezoidCoefficients(*(x[:, 0] for x in inputs[3:6]))
    y, state = trapezoid_step(
        *(x[:, 0] for x in inputs[:3]), coefficients, TrapezoidState(*inputs[6:])
    )
    assert (y.dtype, state.ssm_bhpr.dtype) == (torch.bfloat16, torch.float32)


def test_returned_state_holds_no_other_memory():
    """Keys and values of the last token are copies, not views of the sequence."""
    for tensor in scan()(*scan_inputs(s=50))[1:]:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("pathway", PATHWAYS)
def test_compiles_once_for_many_lengths(pathway):
    """The whole scan needs at most 3 graphs for many lengths."""
    torch._dynamo.reset()
    graphs = []

    def backend(module, example):
        graphs.append(module)
        return torch._dynamo.backends.debugging.aot_eager(module, example)

    compiled = torch.compile(scan(pathway=pathway), fullgraph=True, backend=backend)
    for length in (12, 3, *range(20, 30)):
        assert_ways_agree(scan(pathway=pathway), compiled, scan_inputs(s=length))
    assert len(graphs) <= 3


def test_vmap_and_double_backward():
    """The composition of core and elementwise work maps and differentiates twice."""
    inputs = scan_inputs(1, 3, 1, 2, 1, 2, 2)
    mapped = torch.func.vmap(scan())(*(torch.stack([x, x.flip(1)]) for x in inputs))
    for place, row in enumerate((inputs, [x.flip(1) for x in inputs])):
        for want, got in zip(scan()(*row), mapped, strict=True):
            assert_same(want, got[place])
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradgradcheck(lambda *x: scan()(*x)[:2], leaves)


def test_guards_stand_at_every_door():
    """With the guard on, NaN is named by the function and argument it entered by."""
    v, b, c, *rest = scan_inputs()
    coefficients = TrapezoidCoefficients(*rest[:3])
    v[0, 0] = torch.nan
    with override(deny_nan=True):
        with pytest.raises(NonFiniteError, match="trapezoid_scan: v_bsmhp contains NaN"):
            trapezoid_scan(v, b, c, coefficients)
        with pytest.raises(NonFiniteError, match="trapezoid_coefficients: raw_dt"):
            trapezoid_coefficients(v[..., 0], v[..., 0], v[..., 0], torch.zeros(4).double())
