"""The SSD core: three algorithms, the CPU kernels and the reference are one function."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ssd_core_cases import KINDS, WEIGHTS, by, core_inputs, reference, weighed

from anymamba.ops import same_step, ssd_core
from kernels import dtype_of, running
from laws import assert_same, assert_ways_agree


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


def test_final_state_holds_no_other_memory(kind):
    """The returned state owns just its own values, so that a cache pins no sequence."""
    final = by(kind, 2)(*core_inputs(s=50, dtype=dtype_of(kind))).final_bhpr
    assert final.untyped_storage().nbytes() == final.numel() * final.element_size()


def test_omitted_initial_state_is_zero():
    """No initial state means zeros, one row per sequence when packed."""
    inputs = core_inputs(1)
    cu_seqlens = torch.tensor([0, 4, 7])
    want = ssd_core(*inputs[:4], torch.zeros(2, 2, 3, 4).double(), cu_seqlens=cu_seqlens)
    got = ssd_core(*inputs[:4], cu_seqlens=cu_seqlens)
    assert_same(want.y_bsmhp, got.y_bsmhp)
    assert got.final_bhpr.shape == (2, 2, 3, 4)
