"""The SSD core: three algorithms, the CPU kernels and the reference are one function."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from anymamba.errors import AnyMambaError, BackendError, ConfigError
from anymamba.ops import SsdPath, same_step, softplus, ssd, ssd_core, ssd_step
from anymamba.ops.ssd.recalculated import core_backward
from anymamba.ops.ssd.schema import SSD_CORE
from anymamba.settings import override
from golden import check_golden, golden_case
from kernels import NATIVE, dtype_of, is_native, running
from laws import assert_same, assert_ways_agree, error_of, rand, randn

ALGORITHMS = ["minimal", "serial", "serial_recalculated"]
KINDS = [*ALGORITHMS, *NATIVE]
# No weights, none but own = 0, or both.
WEIGHTS = ["none", "strict", "both"]


@pytest.fixture(params=KINDS)
def kind(request):
    """One implementation after the other; a kernel's instruction set is in force meanwhile."""
    with running(request.param):
        yield request.param


def core_inputs(b=2, s=7, m=1, h=2, g=1, p=3, r=4, rows=None, dtype=torch.float64, decay=1.0):
    """Random inputs of the core, weights last; `rows` states, one per batch row unless packed."""
    return [
        randn(b, s, m, h, p, seed=1, dtype=dtype),
        -decay * rand(b, s, h, seed=2, dtype=dtype),
        randn(b, s, m, g, r, seed=3, dtype=dtype),
        randn(b, s, m, g, r, seed=4, dtype=dtype),
        randn(rows or b, h, p, r, seed=5, dtype=dtype),
        randn(b, s, h, seed=6, dtype=dtype),
        randn(b, s, h, seed=7, dtype=dtype),
    ]


def weighed(inputs, weights):
    """Return the arguments of a call with the weights that are asked for."""
    return inputs if weights == "both" else inputs[:5]


def reference(strict=False, cu_seqlens=None):
    return lambda *x: ssd_core(*x, strict=strict, impl="reference", cu_seqlens=cu_seqlens)


def by(kind, length=None, strict=False, cu_seqlens=None):
    if is_native(kind):
        return lambda *x: ssd_core(*x, strict=strict, impl="native", cu_seqlens=cu_seqlens)
    path = SsdPath(kind, length)
    return lambda *x: ssd_core(*x, strict=strict, path=path, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_algorithms_equal_reference(kind, weights, length):
    """Values, final state and all gradients equal those of the loop over time."""
    inputs = weighed(core_inputs(s=length, m=2, h=4, g=2, dtype=dtype_of(kind)), weights)
    strict = weights == "strict"
    assert_ways_agree(reference(strict), by(kind, 32, strict), inputs)


@pytest.mark.parametrize("rank", [1, 3])
def test_weights_are_those_of_values(kind, rank):
    """A scale is a factor of v; an own weight replaces it where a token meets itself."""
    inputs = core_inputs(s=40, m=rank, dtype=dtype_of(kind))

    def by_hand(v, da, b, c, initial, scale, own):
        y, final = by(kind, 8, True)(scale[:, :, None, :, None] * v, da, b, c, initial)
        return y + same_step(own, v, b, c), final

    assert_ways_agree(by_hand, by(kind, 8), inputs)


def test_an_omitted_own_weight_is_the_scale(kind):
    """Without `own` the state is read after the token is in it."""
    inputs = core_inputs(s=40, m=2, dtype=dtype_of(kind))[:6]
    assert_ways_agree(lambda *x: reference()(*x, x[5]), by(kind, 8), inputs)


def test_a_weight_of_zero_receives_its_gradient(kind):
    """Gradients of the weights are not found by dividing through them."""
    inputs = core_inputs(s=40, m=2, dtype=dtype_of(kind))
    for weight in inputs[5:]:
        weight[:, ::3] = 0
    assert_ways_agree(reference(), by(kind, 8), inputs)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    weights=st.sampled_from(WEIGHTS),
    b=st.integers(1, 3),
    s=st.integers(1, 20),
    m=st.integers(1, 4),
    g=st.integers(1, 3),
    heads_per_group=st.integers(1, 3),
    p=st.integers(1, 5),
    r=st.integers(1, 5),
    length=st.integers(1, 25),
)
def test_algorithms_equal_reference_for_any_shape(
    kind, weights, b, s, m, g, heads_per_group, p, r, length
):
    """No shape, rank, grouping or chunk length changes the numbers."""
    inputs = core_inputs(b, s, m, g * heads_per_group, g, p, r, dtype=dtype_of(kind))
    strict = weights == "strict"
    with running(kind):
        assert_ways_agree(reference(strict), by(kind, length, strict), weighed(inputs, weights))


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    weights=st.sampled_from(WEIGHTS),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    m=st.integers(1, 4),
    length=st.integers(1, 12),
)
def test_packed_equals_separate(kind, weights, lengths, m, length):
    """Packed sequences, empty ones too, equal each sequence by itself; states are per sequence."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    inputs = core_inputs(1, int(cu_seqlens[-1]), m, 4, 2, rows=len(lengths), dtype=dtype_of(kind))
    strict = weights == "strict"
    with running(kind):
        assert_ways_agree(
            reference(strict, cu_seqlens),
            by(kind, length, strict, cu_seqlens.int()),
            weighed(inputs, weights),
        )


# Not minimal: it multiplies whole rows with zeros, and zero times NaN is NaN.
@pytest.mark.parametrize("kind", KINDS[1:], indirect=True)
def test_packed_sequences_are_isolated(kind):
    """NaN in one sequence reaches neither its neighbours nor their gradients."""
    cu_seqlens = torch.tensor([0, 5, 9, 14])
    inputs = [x.requires_grad_() for x in core_inputs(1, 14, rows=3, dtype=dtype_of(kind))]
    with torch.no_grad():
        inputs[0][:, 6] = torch.nan
    y, final = by(kind, 4, False, cu_seqlens)(*inputs)
    assert y[:, :5].isfinite().all()
    assert y[:, 9:].isfinite().all()
    assert final[[0, 2]].isfinite().all()
    grads = torch.autograd.grad(y[:, :5].sum() + y[:, 9:].sum(), inputs)
    assert grads[0][:, :5].isfinite().all()
    assert grads[4][[0, 2]].isfinite().all()


def test_pieces_equal_whole(kind):
    """A sequence in pieces, the state handed on, equals the whole, gradients included."""

    def pieces(v, da, b, c, state, scale, own):
        ys = []
        for start, stop in [(0, 1), (1, 14), (14, 15), (15, 30)]:
            *part, scale_part, own_part = (x[:, start:stop] for x in (v, da, b, c, scale, own))
            y, state = by(kind, 8)(*part, state, scale_part, own_part)
            ys.append(y)
        return torch.cat(ys, 1), state

    assert_ways_agree(by(kind, 8), pieces, core_inputs(s=30, dtype=dtype_of(kind)))


def test_chunk_length_does_not_matter():
    """Chunks of 1, of the whole sequence, and beyond give equal numbers."""
    for length in (1, 2, 3, 5, 13, 26):
        assert_ways_agree(reference(), by("serial_recalculated", length), core_inputs(s=13, m=2))


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


def test_decay_gradient_of_half_types_is_that_of_float32():
    """Half inputs are widened before the decay's gradient is summed."""
    for dtype in (torch.bfloat16, torch.float16):
        inputs = core_inputs(s=40, m=2, dtype=dtype)
        narrow = [inputs[0], inputs[1].float(), *inputs[2:4], *(x.float() for x in inputs[4:])]
        wide = [x.float() for x in inputs]
        grads = [
            core_backward(
                randn(2, 40, 2, 2, 3, seed=6).float(),
                randn(2, 2, 3, 4, seed=7).float(),
                *x,
                16,
                None,
            )
            for x in (narrow, wide)
        ]
        assert_same(grads[1].da, grads[0].da, "grad")
        assert_same(grads[1].initial, grads[0].initial, "grad")
        assert_same(grads[1].scale, grads[0].scale, "grad")
        assert_same(grads[1].own, grads[0].own, "grad")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_accumulate_in_float32(kind, dtype):
    """Half inputs give the float32 result, y rounded once; the state is float32."""
    if is_native(kind) and dtype == torch.float16:
        pytest.skip("the kernels store float32 and bfloat16; float16 is portable")
    inputs = core_inputs(s=65, h=4, g=2, dtype=dtype)
    inputs = [x.float() if x.dim() == 3 else x for x in inputs]
    y, final = by(kind, 16)(*inputs)
    assert y.dtype == dtype
    assert final.dtype == torch.float32
    want_y, want_final = by(kind, 16)(*(x.float() for x in inputs))
    assert_same(want_final, final)
    assert_same(want_y.to(dtype), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.0, 30.0, 1e6])
def test_strong_decay_and_zero_input_stay_finite(kind, dtype, decay):
    """Log-decay sums of hundreds, enormous single steps and zeros give finite numbers."""
    inputs = core_inputs(s=64, dtype=dtype)
    inputs[1] = -decay * rand(2, 64, 2, seed=9, dtype=torch.float32)
    for scale in (1.0, 0.0):
        leaves = [(x * scale if x.dim() == 5 else x).clone().requires_grad_() for x in inputs]
        y, final = by(kind, 32)(*leaves)
        grads = torch.autograd.grad(y.float().sum() + final.sum(), leaves)
        for tensor in (y, final, *grads):
            assert tensor.isfinite().all()


def test_one_enormous_step_does_not_blur_its_neighbours(kind):
    """After a step that forgets everything, small decays are still exact in float32."""
    inputs = core_inputs(s=64, dtype=torch.float32, decay=0.01)
    inputs[1][:, 20] = -1e6
    wide = [x.double() for x in inputs]
    y, _ = by(kind, 64)(*inputs)
    assert_same(reference()(*wide)[0], y)


@pytest.mark.parametrize("length", [64, 256])
def test_weak_decay_behind_strong_decay_is_exact(kind, length):
    """A stretch of strong decay does not blur what follows, in values or gradients."""
    inputs = core_inputs(1, 256, dtype=torch.float32, decay=0.01)
    inputs[1][:, 20:120] = -60.0
    head = randn(1, 256, 1, 2, 3, seed=8)

    def results(way, tensors):
        leaves = [x.clone().requires_grad_() for x in tensors]
        y, final = way(*leaves)
        loss = (y * head.to(y.dtype)).sum() + final.sum()
        return [y, final, *torch.autograd.grad(loss, leaves)]

    want = results(reference(), [x.double() for x in inputs])
    for expected, actual in zip(want, results(by(kind, length), inputs), strict=True):
        assert error_of(expected, actual) < 2e-6


def test_final_state_holds_no_other_memory(kind):
    """The returned state owns just its own values, so that a cache pins no sequence."""
    final = by(kind, 2)(*core_inputs(s=50, dtype=dtype_of(kind))).final_bhpr
    assert final.untyped_storage().nbytes() == final.numel() * final.element_size()


def test_one_tensor_may_fill_two_arguments(kind):
    """One tensor as keys and queries, one as both weights: compiled too, gradients summed."""
    v, da, k, _, initial, scale, _ = core_inputs(dtype=dtype_of(kind))
    way = by(kind, 4)
    both = lambda v, k, w: way(v, da, k, k, initial, w, w)  # noqa: E731
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    want = lambda v, k, w: reference()(v, da, k, k, initial, w, w)  # noqa: E731
    assert_ways_agree(want, both, [v, k, scale])
    assert_ways_agree(both, compiled, [v, k, scale])


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


@pytest.mark.parametrize("kind", ["minimal", *KINDS[2:]], indirect=True)
def test_compiled_code_refuses_bad_borders(kind):
    """Borders are checked under the compiler too, when the graph runs."""
    way = lambda *x: by(kind, 4, False, x[-1])(*x[:-1])  # noqa: E731
    compiled = torch.compile(way, fullgraph=True, backend="eager")
    inputs = core_inputs(1, rows=3, dtype=dtype_of(kind))
    assert_same(
        way(*inputs, torch.tensor([0, 5, 5, 7]))[0],
        compiled(*inputs, torch.tensor([0, 5, 5, 7]))[0],
    )
    with pytest.raises((RuntimeError, ValueError), match="cu_seqlens"):
        compiled(*inputs, torch.tensor([0, 5, 3, 7]))


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed):
    """Schema, fake and bodies of both operators agree."""
    cu_seqlens = torch.tensor([0, 2, 2, 7]) if packed else None
    inputs = core_inputs(1, rows=3 if packed else None)
    grads = [randn(1, 7, 1, 2, 3, seed=6), randn(3 if packed else 1, 2, 3, 4, seed=7)]
    tests = ("test_schema", "test_faketensor")
    for tensors in (inputs, [x.mT.contiguous().mT for x in inputs], [x.bfloat16() for x in inputs]):
        arguments = (*tensors, 4, cu_seqlens, "portable")
        torch.library.opcheck(SSD_CORE.fwd_op, arguments, test_utils=tests)
        torch.library.opcheck(SSD_CORE.bwd_op, (*grads, *arguments), test_utils=tests)


@pytest.mark.parametrize("kind", NATIVE)
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_native(kind, packed):
    """Schema and fake agree with the kernels too."""
    cu_seqlens = torch.tensor([0, 2, 2, 7]) if packed else None
    inputs = core_inputs(1, rows=3 if packed else None, dtype=torch.float32)
    grads = [
        randn(1, 7, 1, 2, 3, seed=6, dtype=torch.float32),
        randn(3 if packed else 1, 2, 3, 4, seed=7, dtype=torch.float32),
    ]
    tests = ("test_schema", "test_faketensor")
    narrow = [x.bfloat16() if x.dim() == 5 else x for x in inputs]
    for tensors in (inputs, narrow):
        arguments = (*tensors, 4, cu_seqlens, "native")
        with running(kind):
            torch.library.opcheck(SSD_CORE.fwd_op, arguments, test_utils=tests)
            heads = (grads[0].to(tensors[0].dtype), grads[1])
            torch.library.opcheck(SSD_CORE.bwd_op, (*heads, *arguments), test_utils=tests)


def test_compiles_once_for_many_lengths(kind):
    """20 lengths need at most 3 graphs, with equal values and gradients."""
    torch._dynamo.reset()
    graphs = 0

    def backend(module, example):
        nonlocal graphs
        graphs += 1
        return torch._dynamo.backends.debugging.aot_eager(module, example)

    way = by(kind, 8)
    compiled = torch.compile(way, fullgraph=True, backend=backend)
    for length in (12, 3, *range(20, 38)):
        assert_ways_agree(way, compiled, core_inputs(s=length, dtype=dtype_of(kind)))
    assert graphs <= 3


def test_autocast_does_not_narrow_the_scan(kind):
    """Under bfloat16 autocast, float32 inputs are still computed in float32."""
    inputs = core_inputs(dtype=torch.float32)
    want = reference()(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        y, final = by(kind, 4)(*inputs)
    assert_same(want.y_bsmhp, y)
    assert_same(want.final_bhpr, final)


def test_runs_on_meta():
    """Shapes flow through every path without data."""
    inputs = [x.to("meta").requires_grad_() for x in core_inputs()]
    for kind in ALGORITHMS:
        y, final = by(kind, 4)(*inputs)
        assert (y.shape, final.shape) == (inputs[0].shape, inputs[4].shape)
        (y.sum() + final.sum()).backward()


def test_omitted_initial_state_is_zero():
    """No initial state means zeros, one row per sequence when packed."""
    inputs = core_inputs(1)
    cu_seqlens = torch.tensor([0, 4, 7])
    want = ssd_core(*inputs[:4], torch.zeros(2, 2, 3, 4).double(), cu_seqlens=cu_seqlens)
    got = ssd_core(*inputs[:4], cu_seqlens=cu_seqlens)
    assert_same(want.y_bsmhp, got.y_bsmhp)
    assert got.final_bhpr.shape == (2, 2, 3, 4)


def mamba2_inputs(case, dtype):
    inputs = case.cast(dtype)
    dt = inputs["dt"]
    if "dt_bias" in inputs:
        dt = softplus(dt + inputs["dt_bias"])
    return inputs, dt


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "name", ["groups_z", "Dhdim_noz_dtlimit", "initial_states", "packed_seq_idx"]
)
def test_mamba2_scan_equals_official(name, kind, dtype):
    """The Mamba-2 scan reproduces the official kernel's values, states and gradients."""
    if is_native(kind) and dtype == torch.float64:
        pytest.skip("the kernels compute in float32")
    case = golden_case("ops/ssd", name)
    inputs, dt = mamba2_inputs(case, dtype)
    how = {"impl": "native"} if is_native(kind) else {"path": SsdPath(kind, 16)}
    if name == "Dhdim_noz_dtlimit":
        dt = dt.clamp(0.1, 0.7)
    out, final = ssd(
        inputs["x"], dt, inputs["A"], inputs["B"], inputs["C"], inputs.get("D"),
        inputs.get("initial_states"), **how, cu_seqlens=inputs.get("cu_seqlens"),
    )  # fmt: skip
    if "z" in inputs:
        out = out * torch.nn.functional.silu(inputs["z"])
    state = "varlen_states" if name == "packed_seq_idx" else "final_states"
    check_golden(case, inputs, {"out": out, state: final})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_step_unrolled_equals_scan(dtype):
    """One token at a time equals the whole scan, gradients included."""
    inputs = [
        randn(2, 9, 4, 3, seed=1, dtype=dtype), rand(2, 9, 4, seed=2, dtype=dtype),
        -rand(4, seed=3, dtype=dtype), randn(2, 9, 2, 5, seed=4, dtype=dtype),
        randn(2, 9, 2, 5, seed=5, dtype=dtype), randn(4, seed=6, dtype=dtype),
        randn(2, 4, 3, 5, seed=7, dtype=dtype),
    ]  # fmt: skip

    def steps(x, dt, a, b, c, skip, state):
        ys = []
        for t in range(x.shape[1]):
            y, state = ssd_step(x[:, t], dt[:, t], a, b[:, t], c[:, t], skip, state)
            ys.append(y)
        return torch.stack(ys, 1), state

    assert_ways_agree(ssd, steps, inputs)


@pytest.mark.parametrize("skip", [None, 4], ids=["plain", "skip"])
def test_half_types_of_the_mamba2_scan_are_rounded_once(kind, skip):
    """With a skip too, the output is the float32 result, rounded at the very end."""
    x, b, c = (randn(2, 40, n, 5, seed=seed).bfloat16() for seed, n in ((1, 4), (4, 2), (5, 2)))
    dt, a = rand(2, 40, 4, seed=2, dtype=torch.float32), -rand(4, seed=3, dtype=torch.float32)
    skip = skip and randn(skip, seed=6, dtype=torch.float32)
    how = {"impl": "native"} if is_native(kind) else {"path": SsdPath(kind, 16)}
    want = ssd(x.float(), dt, a, b.float(), c.float(), skip, **how).y_bshp
    got = ssd(x, dt, a, b, c, skip, **how).y_bshp
    assert torch.equal(want.bfloat16(), got)


BAD_CALLS = {
    "v_bsmhp must have 5 axes": lambda i: {0: i[0][0]},
    "sequence length is 7": lambda i: {1: i[1][:, :6]},
    "groups must divide heads": lambda i: {
        2: i[2].expand(2, 7, 1, 3, 4),
        3: i[3].expand(2, 7, 1, 3, 4),
    },
    "sequence length axis of v_bsmhp is empty": lambda i: {0: i[0][:, :0]},
    "b_bsmgr: activations must be float64": lambda i: {2: i[2].long()},
    "c_bsmgr (torch.float32) must accumulate": lambda i: {3: i[3].float()},
    "da_bsh must be on the device": lambda i: {1: i[1].to("meta")},
    "initial state must have shape (2, 2, 3, 4)": lambda i: {4: i[4][:1]},
    "v_bsmhp must be a tensor": lambda i: {0: [1.0]},
    "scale_bsh must have 3 axes": lambda i: {5: i[5][0]},
    "heads is 2 in v_bsmhp": lambda i: {6: i[6][..., :1]},
    "own_bsh (torch.float32) must accumulate": lambda i: {6: i[6].float()},
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_rejects_bad_tensors(message):
    """Every mistake names the argument, what was expected and what came."""
    inputs = dict(enumerate(core_inputs()))
    with pytest.raises(AnyMambaError) as error:
        ssd_core(*(inputs | BAD_CALLS[message](inputs)).values())
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("borders", "message"),
    [
        ([1, 3, 7], "must start at 0"),
        ([0, 4, 3, 7], "must not decrease"),
        ([0, 3, 6], "must end at the sequence length 7"),
        ([0], "at least 2 borders"),
    ],
)
def test_rejects_bad_borders(borders, message):
    """Borders that do not describe the sequence are refused."""
    with pytest.raises(AnyMambaError, match=message):
        ssd_core(*core_inputs(1), cu_seqlens=torch.tensor(borders))
    with pytest.raises(AnyMambaError, match="batch must be 1"):
        ssd_core(*core_inputs(2), cu_seqlens=torch.tensor([0, 7]))
    with pytest.raises(AnyMambaError, match="int32 or int64"):
        ssd_core(*core_inputs(1), cu_seqlens=torch.tensor([0.0, 7.0]))


def test_rejects_implementations_it_cannot_obey():
    """An explicit implementation is obeyed or refused with the reason."""
    with pytest.raises(BackendError, match="cannot serve this call"):
        ssd_core(*core_inputs(), impl="native")
    with pytest.raises(BackendError, match="names a portable algorithm"):
        ssd_core(*core_inputs(), impl="native", path=SsdPath.minimal())
    with pytest.raises(BackendError, match="has no path"):
        ssd_core(*core_inputs(), impl="reference", path=SsdPath())
    with pytest.raises(ConfigError, match="impl must be one of"):
        ssd_core(*core_inputs(), impl="fast")


def test_rejects_two_words_on_the_own_weight():
    """`strict` says what `own` is, so that both together are refused."""
    with pytest.raises(ConfigError, match="strict is own_bsh = 0"):
        ssd_core(*core_inputs(), strict=True)


def test_guards_find_nan_only_when_on():
    """NaN passes silently by default and is named when the guard is on."""
    inputs = core_inputs()
    inputs[2][0, 0] = torch.nan
    ssd_core(*inputs)
    with override(deny_nan=True), pytest.raises(AnyMambaError, match="b_bsmgr contains NaN"):
        ssd_core(*inputs)
    inputs[2][0, 0] = torch.inf
    with override(deny_inf=True), pytest.raises(AnyMambaError, match="b_bsmgr contains infinity"):
        ssd_core(*inputs)
