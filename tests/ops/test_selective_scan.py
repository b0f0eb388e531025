"""Laws of the Mamba-1 selective scan."""

import gc
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anymamba import settings as switches
from anymamba.errors import (
    BackendError,
    ConfigError,
    DeviceError,
    DtypeError,
    NonFiniteError,
    PackingError,
    ShapeError,
)
from anymamba.ops.numerics import softplus
from anymamba.ops.selective_scan import selective_scan, selective_scan_step
from anymamba.ops.selective_scan.schema import SELECTIVE_SCAN
from golden import check_golden, golden_case, relative_error
from laws import assert_same, assert_ways_agree, rand, randn

FORMS = ("constant", "token", "grouped")
LENGTHS = (1, 63, 64, 65)
NO_PACK = (None, None, None)


def coefficient(
    form: str, batch: int, length: int, channels: int, states: int, seed: int
) -> Tensor:
    """Return B or C in one of its three forms, or grouped with a stated number of groups."""
    if form == "constant":
        return randn(channels, states, seed=seed)
    if form == "token":
        return randn(batch, length, states, seed=seed)
    groups = int(form.removeprefix("grouped") or 2)
    return randn(batch, length, groups, states, seed=seed)


def make(
    length: int,
    *,
    batch: int = 2,
    channels: int = 6,
    states: int = 4,
    b_form: str = "token",
    c_form: str = "token",
    rows: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Return u, dt, a, b, c, skip and a random initial state."""
    sizes = (batch, length, channels, states)
    tensors = [
        randn(batch, length, channels, seed=1),
        rand(batch, length, channels, seed=2, low=0.01, high=0.5),
        -rand(channels, states, seed=3, low=0.1, high=4.0),
        coefficient(b_form, *sizes, seed=4),
        coefficient(c_form, *sizes, seed=5),
        randn(channels, seed=6),
        randn(batch if rows is None else rows, channels, states, seed=7),
    ]
    return [x.to(dtype) for x in tensors]


def reference(*args, **options):
    return selective_scan(*args, impl="reference", **options)


def portable(*args, **options):
    return selective_scan(*args, impl="portable", **options)


def with_chunk_len(chunk_len: int):
    """Return the bare operator at a given chunk length; B and C must be constant or grouped."""

    def run(u, dt, a, b, c, initial):
        return SELECTIVE_SCAN(
            u, dt, a, b, c, initial, b.dim() == 2, c.dim() == 2, chunk_len, *NO_PACK
        )

    return run


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("impl", ["reference", "portable"])
@pytest.mark.parametrize("name", ["full", "grouped_noz", "plain_L1"])
def test_scan_equals_official(name, impl, dtype):
    """Outputs, last state and every gradient equal the official selective_scan_ref."""
    case = golden_case("ops/selective_scan", name)
    given = case.cast(dtype)
    u_bsi, delta_bsi = given["u"].mT, given["delta"].mT
    if name != "grouped_noz":
        delta_bsi = softplus(delta_bsi + given.get("delta_bias", 0.0))
    time_first = [x.mT if x.dim() == 3 else x.permute(0, 3, 1, 2) for x in (given["B"], given["C"])]
    y_bsi, final_bir = selective_scan(
        u_bsi, delta_bsi, given["A"], *time_first, given.get("D"), impl=impl
    )
    if "z" in given:
        y_bsi = y_bsi * F.silu(given["z"].mT)
    check_golden(case, given, {"out": y_bsi.mT, "last_state": final_bir})


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_step_equals_official(dtype, limit):
    """One step equals the official selective_state_update."""
    case = golden_case("ops/steps", "mamba1")
    given = case.cast(dtype)
    y_bi, state_bir = selective_scan_step(
        given["x"],
        softplus(given["dt"] + given["dt_bias"]),
        *(given[name] for name in ("A", "B", "C", "D", "state")),
    )
    y_bi = y_bi * F.silu(given["z"])
    assert relative_error(case.outputs["y"], y_bi.detach()) <= limit
    assert relative_error(case.outputs["state"], state_bir.detach()) <= limit


@pytest.mark.parametrize("c_form", FORMS)
@pytest.mark.parametrize("b_form", FORMS)
def test_portable_equals_reference_for_every_form(b_form, c_form):
    """Values, final state and every gradient agree for all nine pairs of B and C forms."""
    assert_ways_agree(reference, portable, make(19, b_form=b_form, c_form=c_form))


def test_groups_of_b_and_c_may_differ():
    """B with 2 groups beside C with 3 groups works on 6 channels."""
    assert_ways_agree(reference, portable, make(7, b_form="grouped2", c_form="grouped3"))


def test_group_is_channel_over_width():
    """With one group per channel, a grouped B equals a constant B that is repeated over time."""
    u, dt, a, b_ir, c, skip, initial = make(5, b_form="constant")
    b_bsgr = b_ir.expand(2, 5, 6, 4)
    expected = portable(u, dt, a, b_ir, c, skip, initial)
    actual = portable(u, dt, a, b_bsgr, c, skip, initial)
    assert_same(expected.y_bsi, actual.y_bsi)
    assert_same(expected.final_bir, actual.final_bir)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("length", LENGTHS)
def test_portable_equals_reference_at_odd_lengths(length, dtype):
    """Lengths around the chunk length agree in float64 and float32."""
    assert_ways_agree(reference, portable, make(length, c_form="grouped", dtype=dtype))


@pytest.mark.parametrize("chunk_len", [1, 3, 8, 16, 100])
def test_chunk_length_does_not_matter(chunk_len):
    """Every chunk length computes the same values and gradients."""
    inputs = make(17, b_form="grouped3", c_form="constant")
    del inputs[5]

    def expected(u, dt, a, b, c, initial):
        return reference(u, dt, a, b, c, None, initial)

    assert_ways_agree(expected, with_chunk_len(chunk_len), inputs)


@settings(max_examples=25, deadline=None, database=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 40),
    width=st.integers(1, 3),
    groups=st.integers(1, 3),
    states=st.integers(1, 5),
    forms=st.tuples(st.sampled_from(FORMS), st.sampled_from(FORMS)),
)
def test_portable_equals_reference_for_any_shape(batch, length, width, groups, states, forms):
    """Any small shape agrees on values and gradients."""
    b_form, c_form = (f"grouped{groups}" if form == "grouped" else form for form in forms)
    sizes = {"batch": batch, "channels": width * groups, "states": states}
    assert_ways_agree(reference, portable, make(length, **sizes, b_form=b_form, c_form=c_form))


def test_skip_and_initial_are_optional():
    """Without skip and initial state the scan equals zeros in their places."""
    u, dt, a, b, c, skip, initial = make(9)
    expected = portable(u, dt, a, b, c, torch.zeros_like(skip), torch.zeros_like(initial))
    for way in (portable, reference):
        actual = way(u, dt, a, b, c)
        assert_same(expected.y_bsi, actual.y_bsi)
        assert_same(expected.final_bir, actual.final_bir)


def test_arguments_need_not_be_contiguous():
    """Transposed and expanded arguments give the same values and gradients."""
    u, dt, a, b, c, skip, initial = make(18, b_form="grouped")

    def strided(u, dt, a, b, c, skip, initial):
        return portable(
            *(u.mT.contiguous().mT, dt.mT.contiguous().mT, a.mT.contiguous().mT),
            b.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
            *(c.mT.contiguous().mT, skip, initial.mT.contiguous().mT),
        )

    assert_ways_agree(reference, strided, [u, dt, a, b, c, skip, initial])


@pytest.mark.parametrize("kept", [0, 1])
def test_one_output_alone_carries_gradients(kept):
    """A loss on y alone, or on the final state alone, gives the gradients of the reference."""
    inputs = make(21, b_form="constant")
    assert_ways_agree(lambda *x: [reference(*x)[kept]], lambda *x: [portable(*x)[kept]], inputs)


@pytest.mark.parametrize("chosen", range(7))
def test_one_input_alone_receives_its_gradient(chosen):
    """A gradient does not depend on which other inputs ask for one."""
    inputs = make(5)
    grads = []
    for everything in (True, False):
        leaves = [x.clone().requires_grad_(everything or k == chosen) for k, x in enumerate(inputs)]
        y_bsi, final_bir = portable(*leaves)
        (grad,) = torch.autograd.grad(y_bsi.sum() + final_bir.square().sum(), leaves[chosen])
        grads.append(grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("cut", [1, 16, 40])
def test_split_equals_whole(cut):
    """Running two pieces, state handed over, equals one run: values and gradients."""

    def in_pieces(u, dt, a, b, c, skip, initial):
        head = portable(u[:, :cut], dt[:, :cut], a, b[:, :cut], c, skip, initial)
        tail = portable(u[:, cut:], dt[:, cut:], a, b[:, cut:], c, skip, head.final_bir)
        return torch.cat([head.y_bsi, tail.y_bsi], 1), tail.final_bir

    assert_ways_agree(portable, in_pieces, make(65, c_form="constant"))


@pytest.mark.parametrize("form", FORMS)
def test_step_unrolled_equals_scan(form):
    """Stepping through the tokens equals one scan: values and gradients."""

    def at(x, t):
        return x if x.dim() == 2 else x[:, t]

    def unrolled(u, dt, a, b, c, skip, state):
        outputs = []
        for t in range(u.shape[1]):
            y, state = selective_scan_step(u[:, t], dt[:, t], a, at(b, t), at(c, t), skip, state)
            outputs.append(y)
        return torch.stack(outputs, 1), state

    assert_ways_agree(portable, unrolled, make(11, b_form=form, c_form=form))


def test_batch_rows_are_independent():
    """NaN in one batch row does not reach another, in outputs or in gradients."""
    u, dt, a, b, c, skip, initial = make(20)
    u[0] = torch.nan
    u.requires_grad_()
    y_bsi, final_bir = portable(u, dt, a, b, c, skip, initial)
    (grad_u,) = torch.autograd.grad(y_bsi[1].sum() + final_bir[1].sum(), u)
    assert y_bsi[1].isfinite().all()
    assert final_bir[1].isfinite().all()
    assert grad_u[1].isfinite().all()


BORDERS = ([0, 23], [0, 0, 16, 16, 17, 23, 23], [0, 1, 2, 23], [0, 16, 23])


@pytest.mark.parametrize("impl", ["portable", "reference"])
@pytest.mark.parametrize("b_form", FORMS)
@pytest.mark.parametrize("borders", BORDERS, ids=str)
def test_packed_equals_separate(borders, b_form, impl):
    """A packed row equals its sequences run one by one: values, final states, gradients."""
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    rows = len(borders) - 1

    def separate(u, dt, a, b, c, skip, initial):
        outputs, finals = [], []
        for row, (left, right) in enumerate(pairwise(borders)):
            if left == right:
                finals.append(initial[row])
                continue
            piece = slice(left, right)
            b_piece = b if b_form == "constant" else b[:, piece]
            y, final = reference(
                u[:, piece], dt[:, piece], a, b_piece, c[:, piece], skip, initial[row : row + 1]
            )
            outputs.append(y)
            finals.append(final[0])
        return torch.cat(outputs, 1), torch.stack(finals)

    def packed(*args):
        return selective_scan(*args, impl=impl, cu_seqlens=cu_seqlens)

    assert_ways_agree(separate, packed, make(23, batch=1, b_form=b_form, rows=rows))


@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_packed_sequences_never_meet(poisoned):
    """NaN in one packed sequence, or in its state, reaches no other, forward or backward."""
    borders = [0, 17, 18, 40]
    u, dt, a, b, c, skip, initial = make(40, batch=1, rows=3)
    own = slice(borders[poisoned], borders[poisoned + 1])
    clean = [x.clone().requires_grad_() for x in (u, dt, b, c, initial)]
    dirty = [x.clone() for x in (u, dt, b, c, initial)]
    for x in dirty[:4]:
        x[:, own] = torch.nan
    dirty[4][poisoned] = torch.nan
    dirty = [x.requires_grad_() for x in dirty]
    results = []
    for u, dt, b, c, initial in (clean, dirty):
        y, final = portable(u, dt, a, b, c, skip, initial, cu_seqlens=torch.tensor(borders))
        grads = torch.autograd.grad(y.sum() + final.sum(), (u, dt, b, c, initial))
        tokens = [x.clone() for x in (y, *grads[:4])]
        states = [x.clone() for x in (final, grads[4])]
        for x in tokens:
            x[:, own] = 0
        for x in states:
            x[poisoned] = 0
        results.append([*tokens, *states])
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize(("b_form", "c_form"), [("token", "constant"), ("constant", "grouped")])
def test_gradients_equal_finite_differences(b_form, c_form):
    """First and second derivatives pass gradcheck in float64."""
    inputs = make(3, batch=1, channels=2, states=2, b_form=b_form, c_form=c_form)
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(portable, leaves)
    assert torch.autograd.gradgradcheck(portable, leaves)


def test_packed_gradients_equal_finite_differences():
    """First and second derivatives of a packed row pass gradcheck, an empty sequence included."""
    borders = torch.tensor([0, 2, 2, 3])
    leaves = [x.requires_grad_() for x in make(3, batch=1, channels=2, states=1, rows=3)]

    def packed(*args):
        return portable(*args, cu_seqlens=borders)

    assert torch.autograd.gradcheck(packed, leaves)
    assert torch.autograd.gradgradcheck(packed, leaves)


@pytest.mark.parametrize("mapped", [(0, 1, 2, 3, 4, 5, 6), (0, 3), (2,), (4, 6)])
@pytest.mark.parametrize(("b_form", "c_form"), [("token", "grouped"), ("constant", "token")])
def test_vmap_equals_loop(b_form, c_form, mapped):
    """Mapping over any of the inputs equals a loop: values and gradients."""
    base = make(5, b_form=b_form, c_form=c_form)
    inputs = [
        torch.stack([x, 0.5 * x, 0.3 * x]) if place in mapped else x for place, x in enumerate(base)
    ]
    in_dims = tuple(0 if place in mapped else None for place in range(len(base)))

    def loop(*args):
        rows = [
            portable(*(x[row] if place in mapped else x for place, x in enumerate(args)))
            for row in range(3)
        ]
        return [torch.stack(results) for results in zip(*rows, strict=True)]

    def mapped_call(*args):
        return torch.vmap(lambda *x: tuple(portable(*x)), in_dims=in_dims)(*args)

    assert_ways_agree(loop, mapped_call, inputs)


def test_vmap_of_grad_equals_loop():
    """Per-sample gradients by vmap(grad) equal a loop."""
    inputs = make(6, batch=1)
    inputs[0] = randn(3, 1, 6, 6, seed=8)

    def loss(u, *rest):
        y, final = portable(u, *rest)
        return y.square().sum() + final.square().sum()

    gradients = torch.func.grad(loss, argnums=(0, 2, 3))
    actual = torch.vmap(gradients, in_dims=(0, *[None] * 6))(*inputs)
    for row in range(3):
        for expected, found in zip(gradients(inputs[0][row], *inputs[1:]), actual, strict=True):
            assert_same(expected, found[row], "grad")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("b_form", "c_form"), [("grouped", "constant"), ("constant", "grouped")])
def test_operators_pass_opcheck(b_form, c_form, packed):
    """Schema, fake and bodies agree for the forward and the backward operator."""
    u, dt, a, b, c, _, initial = make(
        5, batch=1, b_form=b_form, c_form=c_form, rows=2 if packed else 1
    )
    u = u.mT.contiguous().mT
    tables = NO_PACK
    if packed:
        tables = (
            torch.tensor([0, 2, 5]),
            torch.tensor([0, 0, 1, 1, 1]),
            torch.tensor([0, 1, 0, 1, 2]),
        )
    arguments = (u, dt, a, b, c, initial, b.dim() == 2, c.dim() == 2, None, *tables)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(SELECTIVE_SCAN.fwd_op.default, arguments, test_utils=tests)
    heads = (randn(1, 5, 6, seed=8), randn(*initial.shape, seed=9))
    torch.library.opcheck(SELECTIVE_SCAN.bwd_op.default, (*heads, *arguments), test_utils=tests)


def test_compiles_once_for_all_lengths():
    """torch.compile(fullgraph) over 20 lengths makes at most 3 graphs, with equal results."""
    torch._dynamo.reset()
    graphs = []
    eager = torch._dynamo.lookup_backend("aot_eager")

    def count(graph, inputs):
        graphs.append(graph)
        return eager(graph, inputs)

    compiled = torch.compile(selective_scan, fullgraph=True, backend=count)
    for length in range(2, 22):
        inputs = make(length)
        assert_ways_agree(portable, compiled, inputs)
    assert 1 <= len(graphs) <= 3
    torch._dynamo.reset()


def test_compiled_packed_equals_eager():
    """A packed call compiles into one graph and gives the eager results."""
    torch._dynamo.reset()
    compiled = torch.compile(portable, fullgraph=True, backend="aot_eager")
    borders = torch.tensor([0, 3, 3, 9])

    def run(way):
        return lambda *args: way(*args, cu_seqlens=borders)

    assert_ways_agree(run(portable), run(compiled), make(9, batch=1, rows=3))
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("b_form", FORMS)
def test_half_types_accumulate_in_float32(b_form, dtype):
    """Half-type activations give results near float32, states in float32, gradients in kind."""
    halves = [x.to(dtype) for x in make(65, b_form=b_form)]
    wide = [x.float().requires_grad_() for x in halves]
    leaves = [x.requires_grad_() for x in halves]
    heads = randn(2, 65, 6, seed=8, dtype=dtype), randn(2, 6, 4, seed=9, dtype=torch.float32)
    results = []
    for inputs in (wide, leaves):
        y, final = portable(*inputs)
        loss = (y * heads[0].to(y.dtype)).sum() + (final * heads[1]).sum()
        grads = torch.autograd.grad(loss, inputs)
        results.append((y.detach(), final.detach(), grads))
    (y_wide, final_wide, grads_wide), (y, final, grads) = results
    assert y.dtype == dtype
    assert final.dtype == torch.float32
    assert_same(y_wide, y)
    assert_same(final_wide, final)
    for expected, actual in zip(grads_wide, grads, strict=True):
        assert actual.dtype == dtype
        assert_same(expected, actual, "grad")


def test_float32_parameters_beside_half_activations():
    """Float32 dt, decay rates, skip and state beside bfloat16 activations keep their precision."""
    u, dt, a, b, c, skip, initial = make(30, dtype=torch.float32)
    narrow = [x.bfloat16() for x in (u, b, c)]
    expected = portable(narrow[0].float(), dt, a, *(x.float() for x in narrow[1:]), skip, initial)
    actual = portable(narrow[0], dt, a, *narrow[1:], skip, initial)
    assert actual.y_bsi.dtype == torch.bfloat16
    assert torch.equal(expected.y_bsi.bfloat16(), actual.y_bsi)
    assert torch.equal(expected.final_bir, actual.final_bir)


def test_autocast_does_not_lower_precision():
    """Under bfloat16 autocast the results and gradients are bit for bit those without."""
    results = []
    for enabled in (False, True):
        leaves = [x.requires_grad_() for x in make(33, dtype=torch.float32)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y, final = portable(*leaves)
            step = selective_scan_step(
                *(leaves[k][:, 0] if k in (0, 1, 3, 4) else leaves[k] for k in range(7))
            )
            grads = torch.autograd.grad(y.sum() + final.sum(), leaves)
        results.append([y, final, *step, *grads])
    for expected, actual in zip(*results, strict=True):
        assert expected.dtype == actual.dtype == torch.float32
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_strong_decays_stay_finite(dtype):
    """Log-decay sums of thousands, single steps of hundreds, give the reference's gradients."""
    inputs = make(65, dtype=dtype)
    inputs[1] = inputs[1] * 20
    inputs[2] = inputs[2] * 50
    assert float((inputs[1][..., None] * inputs[2]).min()) < -700
    assert_ways_agree(reference, portable, inputs)


def test_zero_inputs_give_zero_outputs_and_finite_gradients():
    """With everything zero the outputs vanish and every gradient is finite."""
    leaves = [torch.zeros_like(x).requires_grad_() for x in make(18)]
    y, final = portable(*leaves)
    assert not y.any()
    assert not final.any()
    for grad in torch.autograd.grad(y.sum() + final.sum(), leaves):
        assert grad.isfinite().all()


def test_long_memory_does_not_drift_in_float32():
    """Decays near one over 1000 tokens stay within float32 tolerance of float64."""
    inputs = make(1000, batch=1)
    inputs[1] = inputs[1] * 1e-3
    expected = portable(*inputs)
    actual = portable(*(x.float() for x in inputs))
    assert_same(expected.y_bsi, actual.y_bsi)
    assert_same(expected.final_bir, actual.final_bir)


@pytest.mark.parametrize("b_form", ["token", "constant"])
def test_memory_does_not_hold_the_states_of_all_tokens(b_form):
    """Forward and backward allocate far less than one tensor over (b, s, i, r)."""
    from torch.profiler import ProfilerActivity, profile

    inputs = make(2048, batch=1, channels=64, states=16, b_form=b_form, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in inputs]
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        y, final = portable(*leaves)
        kept = [y, final, *torch.autograd.grad(y.sum() + final.sum(), leaves)]
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    states = 2048 * 64 * 16 * 4
    assert peak - sum(x.nbytes for x in kept) < 0.5 * states


def test_backward_saves_only_the_inputs():
    """Autograd holds no tensor that is not an input or made of inputs without a state axis."""
    leaves = [x.requires_grad_() for x in make(64, channels=8, states=16)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        portable(*leaves)
    assert max(x.numel() for x in saved) <= 2 * 64 * 16


def test_runs_on_meta():
    """Shapes and dtypes come out of meta tensors, forward and backward, packed too."""
    inputs = make(20, batch=1, dtype=torch.bfloat16, rows=2)
    leaves = [x.to("meta").requires_grad_() for x in inputs]
    for borders in (None, torch.tensor([0, 5, 20])):
        if borders is None:
            leaves[6] = torch.empty(1, 6, 4, device="meta", requires_grad=True)
        else:
            leaves[6] = torch.empty(2, 6, 4, device="meta", requires_grad=True)
        y, final = portable(*leaves, cu_seqlens=borders)
        assert (y.shape, y.dtype, y.device.type) == ((1, 20, 6), torch.bfloat16, "meta")
        assert (final.shape, final.dtype) == (leaves[6].shape, torch.float32)
        for leaf, grad in zip(
            leaves, torch.autograd.grad(y.sum() + final.sum(), leaves), strict=True
        ):
            assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)


def replaced(place: int, value: object, **sizes) -> list:
    arguments: list = make(5, **sizes)
    arguments[place] = value
    return arguments


MISTAKES = {
    "u rank": (replaced(0, torch.ones(2, 5)), ShapeError, "u_bsi"),
    "u no tensor": (replaced(0, 1.0), DtypeError, "u_bsi"),
    "u integer": (replaced(0, torch.ones(2, 5, 6, dtype=torch.int64)), DtypeError, "u_bsi"),
    "dt length": (replaced(1, torch.ones(2, 4, 6).double()), ShapeError, "dt_bsi"),
    "dt dtype": (replaced(1, torch.ones(2, 5, 6).half()), DtypeError, "dt_bsi"),
    "a channels": (replaced(2, torch.ones(5, 4).double()), ShapeError, "a_ir"),
    "b rank": (replaced(3, torch.ones(4).double()), ShapeError, "b must have"),
    "b no tensor": (replaced(3, None), DtypeError, "b must be"),
    "b states": (replaced(3, torch.ones(2, 5, 3).double()), ShapeError, "b must have state size"),
    "b length": (replaced(3, torch.ones(2, 6, 4).double()), ShapeError, "b must have sequence"),
    "b groups": (replaced(3, torch.ones(2, 5, 4, 4).double()), ConfigError, "groups of b"),
    "b empty": (replaced(3, torch.ones(2, 5, 0, 4).double()), ShapeError, "b_bsgr"),
    "b dtype": (replaced(3, torch.ones(2, 5, 4)), DtypeError, "b must have the dtype"),
    "b device": (replaced(3, torch.ones(2, 5, 4, device="meta").double()), DeviceError, "b must"),
    "c constant channels": (
        replaced(4, torch.ones(5, 4).double()),
        ShapeError,
        "c must have inner",
    ),
    "c groups": (replaced(4, torch.ones(2, 5, 5, 4).double()), ConfigError, "groups of c"),
    "skip": (replaced(5, torch.ones(5).double()), ShapeError, "skip_i"),
    "initial rank": (replaced(6, torch.ones(6, 4).double()), ShapeError, "initial_bir"),
    "initial rows": (replaced(6, torch.ones(3, 6, 4).double()), ShapeError, "initial_bir"),
    "initial dtype": (replaced(6, torch.ones(2, 6, 4)), DtypeError, "initial_bir"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rejects_bad_arguments_by_name(mistake):
    """A bad argument raises our error, which names it."""
    arguments, error, words = MISTAKES[mistake]
    with pytest.raises(error, match=words) as caught:
        portable(*arguments)
    assert str(caught.value).startswith("selective_scan: ")


def test_rejects_empty_sequences_outside_packing():
    """Zero tokens is a mistake."""
    with pytest.raises(ShapeError, match="empty"):
        portable(*make(5)[:1], torch.ones(2, 0, 6).double(), *make(5)[2:])


def test_rejects_unknown_and_missing_implementations():
    """An unknown impl is a configuration error; the native one is refused with the reason."""
    with pytest.raises(ConfigError, match="impl"):
        selective_scan(*make(3), impl="fast")
    with pytest.raises(BackendError, match="impl='native'"):
        selective_scan(*make(3), impl="native")


def test_rejects_bad_packing():
    """Borders that do not describe the row, a batch, or states of another count are refused."""
    arguments = make(5, batch=1, rows=2)
    with pytest.raises(PackingError, match="end at the sequence length"):
        portable(*arguments, cu_seqlens=torch.tensor([0, 2, 4]))
    with pytest.raises(PackingError, match="batch must be 1"):
        portable(*make(5), cu_seqlens=torch.tensor([0, 2, 5]))
    with pytest.raises(ShapeError, match="one row per packed sequence"):
        portable(*arguments, cu_seqlens=torch.tensor([0, 2, 3, 5]))
    with pytest.raises(DtypeError, match="cu_seqlens"):
        portable(*arguments, cu_seqlens=[0, 2, 5])


STEP_MISTAKES = {
    "u": (0, torch.ones(2).double(), ShapeError, "u_bi"),
    "state": (6, torch.ones(3, 6, 4).double(), ShapeError, "state_bir"),
    "b shape": (3, torch.ones(5, 4).double(), ShapeError, "b must have shape"),
    "c no tensor": (4, 2.0, DtypeError, "c must be a tensor"),
    "c groups": (4, torch.ones(2, 5, 4).double(), ConfigError, "groups of c"),
    "dt dtype": (1, torch.ones(2, 6).half(), DtypeError, "dt_bi"),
}


@pytest.mark.parametrize("mistake", STEP_MISTAKES)
def test_step_rejects_bad_arguments_by_name(mistake):
    """A bad argument of a step raises our error, which names it."""
    place, value, error, words = STEP_MISTAKES[mistake]
    arguments = [x[:, 0] if k in (0, 1, 3, 4) else x for k, x in enumerate(make(5))]
    arguments[place] = value
    with pytest.raises(error, match=words):
        selective_scan_step(*arguments)


def test_guards_report_nan():
    """With the guard on, NaN in an argument is reported by name."""
    arguments = replaced(3, torch.full((2, 5, 4), torch.nan).double())
    with switches.override(deny_nan=True), pytest.raises(NonFiniteError, match="b contains NaN"):
        portable(*arguments)
