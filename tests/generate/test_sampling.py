"""Laws of choosing a token: filters, penalties, draws and seeds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from anymamba.errors import ConfigError
from anymamba.generate import (
    SamplingConfig,
    draw,
    keep_above,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_counts,
    penalize_repetition,
    restrict,
    row_seed,
)
from golden import HERE
from laws import randn


@pytest.fixture(scope="module")
def golden():
    return load_file(HERE / "ops" / "sampling.safetensors")


def kept(logits):
    """Return which tokens of one row are left."""
    return [place for place, value in enumerate(logits.tolist()) if value > -math.inf]


def of_masses(*masses):
    return torch.tensor(masses).log()


@pytest.mark.parametrize(
    ("case", "way"),
    [
        ("top_k_5", lambda x: keep_top_k(x, 5)),
        ("top_p_0.3", lambda x: keep_top_p(x, 0.3)),
        ("top_p_0.9", lambda x: keep_top_p(x, 0.9)),
        ("min_p_threshold_0.5", lambda x: keep_above(x, 0.5)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_filters_equal_official_ones(golden, case, way, dtype):
    """Each filter leaves exactly the logits that the official one leaves, and no input changes."""
    logits = golden["in/logits"].to(dtype)
    before = logits.clone()
    assert torch.equal(golden[f"out/{case}"].to(dtype), way(logits))
    assert torch.equal(before, logits)


def test_repetition_penalty_equals_official_one(golden):
    """Seen tokens are penalised once, however often they occurred."""
    logits = golden["in/logits"]
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, golden["in/prev_tokens"], True)
    torch.testing.assert_close(
        penalize_repetition(logits, seen, 1.3), golden["out/repetition_1.3"], rtol=1e-12, atol=0
    )


def test_penalties_equal_hand_computed_ones():
    """Division and multiplication by sign; subtraction per occurrence and once."""
    logits = torch.tensor([2.0, -2.0, 0.0, 3.0])
    seen = torch.tensor([True, True, True, False])
    assert penalize_repetition(logits, seen, 2.0).tolist() == [1.0, -4.0, 0.0, 3.0]
    counts = torch.tensor([0.0, 1.0, 3.0, 0.0])
    assert penalize_counts(logits, counts, 0.5, 0.25).tolist() == [2.0, -2.75, -1.75, 3.0]
    assert penalize_counts(logits, counts, -1.0, 0.0).tolist() == [2.0, -1.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("p", "expected"),
    [(0.1, [2]), (0.5, [2]), (0.51, [0, 2]), (0.8, [0, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_crossing_token(p, expected):
    """Tokens stay until the mass before them reaches p."""
    assert kept(keep_top_p(of_masses(0.25, 0.0625, 0.5, 0.1875), p)) == expected


def test_top_p_among_equal_tokens_keeps_no_more_than_needed():
    """Ties are broken, so that half the mass of a uniform row is half the row: the first."""
    assert kept(keep_top_p(torch.zeros(64), 0.5)) == list(range(32))


@pytest.mark.parametrize("spread", [0.001, 0.1, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.9999])
def test_top_p_is_that_of_a_sorted_vocabulary(spread, p):
    """Whether all tokens lie in one bin, in many, or beyond the last, the nucleus is exact."""
    logits = spread * randn(2, 3, 5000, seed=0, dtype=torch.float64)
    logits[0, 0, ::7] = -math.inf
    values, index = logits.sort(descending=True, stable=True)
    mass = values.softmax(-1)
    values[mass.cumsum(-1) - mass >= p] = -math.inf
    expected = torch.empty_like(logits).scatter(-1, index, values)
    assert torch.equal(expected, keep_top_p(logits, p))


def test_top_p_leaves_nan_to_be_found():
    """A row without meaning does not fail here, and does not touch its neighbour."""
    logits = torch.tensor([[math.nan, 0.0, 1.0], [0.0, 1.0, 5.0]])
    nucleus = keep_top_p(logits, 0.5)
    assert nucleus[0].isnan().any()
    assert kept(nucleus[1]) == [2]


def test_min_p_is_a_ratio_to_the_largest_probability():
    """A token stays from min_p times the largest probability on, however the logits are shifted."""
    logits = of_masses(0.5, 0.3, 0.12, 0.08)
    assert kept(keep_min_p(logits, 0.2)) == [0, 1, 2]
    assert kept(keep_min_p(logits - 100, 0.2)) == [0, 1, 2]
    assert kept(keep_min_p(logits, 0.0)) == [0, 1, 2, 3]
    assert kept(keep_min_p(logits, 1.0)) == [0]


def test_filters_work_on_what_is_left():
    """Temperature comes before all filters, and top-p measures the mass inside the top-k."""
    logits = of_masses(0.4, 0.3, 0.2, 0.1)
    # Inside the two likeliest the first has 4/7 > 0.5; of the whole it has 0.4.
    assert kept(restrict(logits, SamplingConfig(temperature=1, top_k=2, top_p=0.5))) == [0]
    assert kept(restrict(logits, SamplingConfig(temperature=1, top_p=0.5))) == [0, 1]
    # Flattened, the second has half the mass of the first to the power of 1/10.
    assert kept(restrict(logits, SamplingConfig(temperature=10, min_p=0.9))) == [0, 1, 2]
    assert torch.equal(logits, restrict(logits, SamplingConfig(top_k=1)))


def test_draw_inverts_the_distribution_function():
    """Numbers between cumulative masses give the token in between; empty tokens are skipped."""
    logits_bw = of_masses(0.0, 0.25, 0.0, 0.5, 0.25, 0.0).expand(6, 6)
    uniform_b = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1.0])
    assert draw(logits_bw, uniform_b).tolist() == [1, 1, 3, 3, 4, 4]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40),
    st.floats(0, 1, width=32),
    st.integers(0, 39),
)
def test_draw_never_takes_a_removed_token(values, uniform, removed):
    """Whatever the number, rounding included, the drawn token has mass."""
    logits_bw = torch.tensor([values], dtype=torch.float32)
    if len(values) > 1:
        logits_bw[0, removed % len(values)] = -math.inf
    [token] = draw(logits_bw, torch.tensor([uniform], dtype=torch.float32)).tolist()
    assert logits_bw[0, token] > -math.inf


def test_draws_follow_the_probabilities():
    """Evenly spread numbers give each token its share."""
    logits_w = randn(10, seed=3, dtype=torch.float32)
    uniform_b = torch.arange(10000) / 10000
    share = draw(logits_w.expand(10000, 10), uniform_b).bincount(minlength=10) / 10000
    torch.testing.assert_close(share, logits_w.softmax(-1), rtol=0, atol=2e-4)


def test_row_seeds_are_distinct_and_stable():
    """Row 0 has the batch's seed, no two rows share one, and the numbers never change."""
    seeds = [row_seed(seed, row) for seed in range(50) for row in range(50)]
    assert len(set(seeds)) == 2500
    assert row_seed(7, 0) == 7
    assert row_seed(7, 1) == 0x9E3779B97F4A7C1C


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"presence_penalty": None},
    ],
)
def test_rejects_options_out_of_range(option):
    """Each option names itself and what it must be."""
    [name] = option
    with pytest.raises(ConfigError, match=rf"SamplingConfig: {name} must be .*; got"):
        SamplingConfig(**option)
