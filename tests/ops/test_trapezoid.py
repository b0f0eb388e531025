"""The Mamba-3 recurrence: both pathways, steps, pieces and packs are one function."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anymamba.errors import AnyMambaError, NonFiniteError
from anymamba.ops import (
    SsdPath,
    TrapezoidCoefficients,
    TrapezoidState,
    angle_increment,
    cumulate_angles,
    gated_rms_norm,
    quaternion_conjugate,
    quaternion_from_vector,
    quaternion_multiply,
    quaternion_normalize,
    rotate_blocks,
    rotate_pairs,
    ssd_core,
    trapezoid_coefficients,
    trapezoid_fixed_point,
    trapezoid_scan,
    trapezoid_step,
)
from anymamba.settings import override
from golden import check_golden, golden_case
from kernels import NATIVE, PRECISIONS, dtype_of, is_native, running
from laws import assert_same, assert_ways_agree, error_of, rand, randn

KINDS = ["minimal", "serial", "serial_recalculated", *NATIVE]
PATHWAYS = ["single", "double"]


def scan_inputs(b=2, s=7, m=2, h=4, g=2, p=3, r=4, rows=None, dtype=torch.float64):
    """Return v, b, c, dt, da, lam and a random state: ssm, k, v."""
    rows = rows or b
    dt = rand(b, s, h, seed=4, low=0.05, dtype=dtype)
    return [
        randn(b, s, m, h, p, seed=1, dtype=dtype),
        randn(b, s, m, g, r, seed=2, dtype=dtype),
        randn(b, s, m, g, r, seed=3, dtype=dtype),
        dt,
        -dt * rand(b, s, h, seed=5, low=0.1, dtype=dtype),
        rand(b, s, h, seed=6, dtype=dtype),
        randn(rows, h, p, r, seed=7, dtype=dtype),
        randn(rows, m, g, r, seed=8, dtype=dtype),
        randn(rows, m, h, p, seed=9, dtype=dtype),
    ]


def scan(**options):
    def run(v, b, c, dt, da, lam, *state):
        coefficients = TrapezoidCoefficients(dt, da, lam)
        y, state = trapezoid_scan(v, b, c, coefficients, TrapezoidState(*state), **options)
        return (y, *state)

    return run


def how(kind, length):
    """Return the options that choose an implementation."""
    return {"impl": "native"} if is_native(kind) else {"path": SsdPath(kind, length)}


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


def official_scan(inputs, *, rank, cu_seqlens=None, **options):
    """Compose our operators into the semantics of the official fused Mamba-3 kernels."""
    mimo = rank is not None
    v, heads = inputs["V"], inputs["V"].shape[2]
    q, k = (inputs[name] if mimo else inputs[name].unsqueeze(2) for name in ("Q", "K"))
    q_bias, k_bias = (
        inputs[f"{name}_bias"].transpose(0, 1) if mimo else inputs[f"{name}_bias"].unsqueeze(0)
        for name in ("Q", "K")
    )
    dt, da, trap = (inputs[name].transpose(1, 2) for name in ("DT", "ADT", "Trap"))
    rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    groups, angles = q.shape[3], inputs["Angles"].shape[-1]
    start = inputs.get("angle0", v.new_zeros(rows, heads, angles))
    increment = angle_increment(inputs["Angles"], dt.unsqueeze(-1))
    angle, last_angle = cumulate_angles(increment, start, cu_seqlens=cu_seqlens)
    pairing = "half_split" if mimo else "interleaved"

    def prepare(x, bias):
        x = x.repeat_interleave(heads // groups, 3) + bias
        return rotate_pairs(x, angle.unsqueeze(2), pairing)

    values = v.unsqueeze(2)
    if mimo:
        values = values * inputs["MIMO_V"].transpose(0, 1)
    state = None
    if "ssm0" in inputs:
        state = TrapezoidState(inputs["ssm0"], inputs["k0"].unsqueeze(1), inputs["v0"].unsqueeze(1))
    y, last = trapezoid_scan(
        values, prepare(k, k_bias), prepare(q, q_bias),
        TrapezoidCoefficients(dt, da, trap.sigmoid()), state, cu_seqlens=cu_seqlens, **options,
    )  # fmt: skip
    if "D" in inputs:
        y = y + inputs["D"][:, None] * values
    if "Z" in inputs:
        gate = inputs["Z"].unsqueeze(2)
        if mimo:
            gate = gate * inputs["MIMO_Z"].transpose(0, 1)
        if "norm_weight" in inputs:
            width = v.shape[-1]
            flat = (x.flatten(-2) for x in (y, gate.expand_as(y)))
            normed = gated_rms_norm(
                *flat, inputs["norm_weight"], group_size=width, norm_before_gate=True
            )
            y = normed.view(y.shape)
        else:
            y = y * torch.nn.functional.silu(gate)
    if "MIMO_Out" in inputs:
        y = (y * inputs["MIMO_Out"].transpose(0, 1)).sum(2)
    elif not mimo:
        y = y.squeeze(2)
    ends = v[:, -1] if cu_seqlens is None else v[0, cu_seqlens[1:].long() - 1]
    last_k = last.k_bmgr if mimo else last.k_bmgr.squeeze(1)
    return {"out": y, "angle": last_angle, "ssm": last.ssm_bhpr, "k": last_k, "v": ends}


@PRECISIONS
@pytest.mark.parametrize("pathway", PATHWAYS)
@pytest.mark.parametrize("name", ["states", "nostate_rope1_gqa", "bare", "L1_state", "varlen"])
def test_siso_scan_equals_official(name, pathway, dtype):
    """The composed SISO scan reproduces the official kernel: values, four states, gradients."""
    case = golden_case("ops/mamba3_siso", name)
    inputs = case.cast(dtype)
    outputs = official_scan(inputs, rank=None, pathway=pathway, cu_seqlens=inputs.get("cu_seqlens"))
    check_golden(case, inputs, outputs, angles=("angle",))


@PRECISIONS
@pytest.mark.parametrize("pathway", PATHWAYS)
@pytest.mark.parametrize("name", ["reduce_z", "noreduce_noz", "fused_norm_gqa_rope1", "varlen"])
def test_mimo_scan_equals_official(name, pathway, dtype):
    """The composed MIMO scan reproduces the official kernel: values, four states, gradients."""
    case = golden_case("ops/mamba3_mimo", name)
    inputs = case.cast(dtype)
    rank = inputs["Q"].shape[2]
    outputs = official_scan(inputs, rank=rank, pathway=pathway, cu_seqlens=inputs.get("cu_seqlens"))
    check_golden(case, inputs, outputs, angles=("angle",))


@PRECISIONS
@pytest.mark.parametrize(("name", "pairing"), [("siso", "interleaved"), ("mimo", "half_split")])
def test_step_equals_official(name, pairing, dtype):
    """The composed one-token update reproduces the official decode kernels."""
    case = golden_case("ops/steps", f"mamba3_{name}")
    i = case.cast(dtype)
    angle = i["angle0"] + angle_increment(i["angle_proj"], i["dt"].unsqueeze(-1))
    b, c = (rotate_pairs(i[x] + i[f"{x}_bias"], angle.unsqueeze(1), pairing) for x in "BC")
    v, before = (x.unsqueeze(1) * i["xproj"] for x in (i["x"], i["v0"]))
    coefficients = TrapezoidCoefficients(i["dt"], i["dt"] * i["A"], i["trap"])
    y, state = trapezoid_step(v, b, c, coefficients, TrapezoidState(i["ssm0"], i["k0"], before))
    y = (y + i["D"][:, None] * v) * torch.nn.functional.silu(i["z"].unsqueeze(1) * i["zproj"])
    y = (y * i["outproj"]).sum(1)
    outputs = {"y": y, "ssm": state.ssm_bhpr, "k": state.k_bmgr, "angle": angle}
    check_golden(case, i, outputs, angles=("angle",))


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
