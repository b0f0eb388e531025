"""Laws of the Mamba-1 selective scan: official numbers, forms of B and C, pieces, packing."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from selective_scan_cases import FORMS, LENGTHS, fast, make, reference, with_chunk_len

from anymamba.ops.numerics import softplus
from anymamba.ops.selective_scan import selective_scan, selective_scan_step
from golden import check_golden, golden_case, relative_error
from kernels import NATIVE, PRECISIONS, dtype_of, running
from laws import assert_same, assert_ways_agree


@PRECISIONS
@pytest.mark.parametrize("impl", ["reference", "auto"])
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


@PRECISIONS
@pytest.mark.parametrize("c_form", FORMS)
@pytest.mark.parametrize("b_form", FORMS)
def test_scan_equals_reference_for_every_form(b_form, c_form, dtype):
    """Values, final state and every gradient agree for all nine pairs of B and C forms."""
    assert_ways_agree(reference, fast, make(19, b_form=b_form, c_form=c_form, dtype=dtype))


@PRECISIONS
def test_groups_of_b_and_c_may_differ(dtype):
    """B with 2 groups beside C with 3 groups works on 6 channels."""
    assert_ways_agree(reference, fast, make(7, b_form="grouped2", c_form="grouped3", dtype=dtype))


def test_group_is_channel_over_width():
    """With one group per channel, a grouped B equals a constant B that is repeated over time."""
    u, dt, a, b_ir, c, skip, initial = make(5, b_form="constant")
    b_bsgr = b_ir.expand(2, 5, 6, 4)
    expected = fast(u, dt, a, b_ir, c, skip, initial)
    actual = fast(u, dt, a, b_bsgr, c, skip, initial)
    assert_same(expected.y_bsi, actual.y_bsi)
    assert_same(expected.final_bir, actual.final_bir)


@PRECISIONS
@pytest.mark.parametrize("length", LENGTHS)
def test_scan_equals_reference_at_odd_lengths(length, dtype):
    """Lengths around the chunk length agree in float64 and float32."""
    assert_ways_agree(reference, fast, make(length, c_form="grouped", dtype=dtype))


@pytest.mark.parametrize("chunk_len", [1, 3, 8, 16, 100])
def test_chunk_length_does_not_matter(chunk_len):
    """Every chunk length computes the same values and gradients."""
    inputs = make(17, b_form="grouped3", c_form="constant")
    del inputs[5]

    def expected(u, dt, a, b, c, initial):
        return reference(u, dt, a, b, c, None, initial)

    assert_ways_agree(expected, with_chunk_len(chunk_len), inputs)


@settings(max_examples=40, deadline=None, database=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 40),
    width=st.integers(1, 3),
    groups=st.integers(1, 3),
    states=st.integers(1, 5),
    forms=st.tuples(st.sampled_from(FORMS), st.sampled_from(FORMS)),
    kind=st.sampled_from(["any", *NATIVE]),
)
def test_scan_equals_reference_for_any_shape(batch, length, width, groups, states, forms, kind):
    """Any small shape agrees on values and gradients."""
    b_form, c_form = (f"grouped{groups}" if form == "grouped" else form for form in forms)
    sizes = {"batch": batch, "channels": width * groups, "states": states}
    inputs = make(length, **sizes, b_form=b_form, c_form=c_form, dtype=dtype_of(kind))
    with running(kind):
        assert_ways_agree(reference, fast, inputs)


def test_skip_and_initial_are_optional():
    """Without skip and initial state the scan equals zeros in their places."""
    u, dt, a, b, c, skip, initial = make(9)
    expected = fast(u, dt, a, b, c, torch.zeros_like(skip), torch.zeros_like(initial))
    for way in (fast, reference):
        actual = way(u, dt, a, b, c)
        assert_same(expected.y_bsi, actual.y_bsi)
        assert_same(expected.final_bir, actual.final_bir)


@PRECISIONS
def test_arguments_need_not_be_contiguous(dtype):
    """Transposed and expanded arguments give the same values and gradients."""
    u, dt, a, b, c, skip, initial = make(18, b_form="grouped", dtype=dtype)

    def strided(u, dt, a, b, c, skip, initial):
        return fast(
            *(u.mT.contiguous().mT, dt.mT.contiguous().mT, a.mT.contiguous().mT),
            b.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
            *(c.mT.contiguous().mT, skip, initial.mT.contiguous().mT),
        )

    assert_ways_agree(reference, strided, [u, dt, a, b, c, skip, initial])


@PRECISIONS
@pytest.mark.parametrize("kept", [0, 1])
def test_one_output_alone_carries_gradients(kept, dtype):
    """A loss on y alone, or on the final state alone, gives the gradients of the reference."""
    inputs = make(21, b_form="constant", dtype=dtype)
    assert_ways_agree(lambda *x: [reference(*x)[kept]], lambda *x: [fast(*x)[kept]], inputs)


@PRECISIONS
@pytest.mark.parametrize("chosen", range(7))
def test_one_input_alone_receives_its_gradient(chosen, dtype):
    """A gradient does not depend on which other inputs ask for one."""
    inputs = make(5, dtype=dtype)
    grads = []
    for everything in (True, False):
        leaves = [x.clone().requires_grad_(everything or k == chosen) for k, x in enumerate(inputs)]
        y_bsi, final_bir = fast(*leaves)
        (grad,) = torch.autograd.grad(y_bsi.sum() + final_bir.square().sum(), leaves[chosen])
        grads.append(grad)
    assert torch.equal(*grads)


@PRECISIONS
@pytest.mark.parametrize("cut", [1, 16, 40])
def test_split_equals_whole(cut, dtype):
    """Running two pieces, state handed over, equals one run: values and gradients."""

    def in_pieces(u, dt, a, b, c, skip, initial):
        head = fast(u[:, :cut], dt[:, :cut], a, b[:, :cut], c, skip, initial)
        tail = fast(u[:, cut:], dt[:, cut:], a, b[:, cut:], c, skip, head.final_bir)
        return torch.cat([head.y_bsi, tail.y_bsi], 1), tail.final_bir

    assert_ways_agree(fast, in_pieces, make(65, c_form="constant", dtype=dtype))


@PRECISIONS
@pytest.mark.parametrize("form", FORMS)
def test_step_unrolled_equals_scan(form, dtype):
    """Stepping through the tokens equals one scan: values and gradients."""

    def at(x, t):
        return x if x.dim() == 2 else x[:, t]

    def unrolled(u, dt, a, b, c, skip, state):
        outputs = []
        for t in range(u.shape[1]):
            y, state = selective_scan_step(u[:, t], dt[:, t], a, at(b, t), at(c, t), skip, state)
            outputs.append(y)
        return torch.stack(outputs, 1), state

    assert_ways_agree(fast, unrolled, make(11, b_form=form, c_form=form, dtype=dtype))


@PRECISIONS
def test_batch_rows_are_independent(dtype):
    """NaN in one batch row does not reach another, in outputs or in gradients."""
    u, dt, a, b, c, skip, initial = make(20, dtype=dtype)
    u[0] = torch.nan
    u.requires_grad_()
    y_bsi, final_bir = fast(u, dt, a, b, c, skip, initial)
    (grad_u,) = torch.autograd.grad(y_bsi[1].sum() + final_bir[1].sum(), u)
    assert y_bsi[1].isfinite().all()
    assert final_bir[1].isfinite().all()
    assert grad_u[1].isfinite().all()


BORDERS = ([0, 23], [0, 0, 16, 16, 17, 23, 23], [0, 1, 2, 23], [0, 16, 23])


@PRECISIONS
@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("b_form", FORMS)
@pytest.mark.parametrize("borders", BORDERS, ids=str)
def test_packed_equals_separate(borders, b_form, impl, dtype):
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

    inputs = make(23, batch=1, b_form=b_form, rows=rows, dtype=dtype)
    assert_ways_agree(separate, packed, inputs)


@PRECISIONS
@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_packed_sequences_never_meet(poisoned, dtype):
    """NaN in one packed sequence, or in its state, reaches no other, forward or backward."""
    borders = [0, 17, 18, 40]
    u, dt, a, b, c, skip, initial = make(40, batch=1, rows=3, dtype=dtype)
    own = slice(borders[poisoned], borders[poisoned + 1])
    clean = [x.clone().requires_grad_() for x in (u, dt, b, c, initial)]
    dirty = [x.clone() for x in (u, dt, b, c, initial)]
    for x in dirty[:4]:
        x[:, own] = torch.nan
    dirty[4][poisoned] = torch.nan
    dirty = [x.requires_grad_() for x in dirty]
    results = []
    for u, dt, b, c, initial in (clean, dirty):
        y, final = fast(u, dt, a, b, c, skip, initial, cu_seqlens=torch.tensor(borders))
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
