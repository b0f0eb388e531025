"""Laws of choosing a token inside `generate`: the short ways choose what the long one does.

A processor replaces the logits of the model, so that the test knows them.
"""

import math

import pytest
import torch

from anymamba.generate import SamplingConfig, generate, keep_top_k, restrict, uniform
from anymamba.models import MambaConfig, MambaLM
from laws import randn

VOCABULARY = 300
ROWS = 48


@pytest.fixture(scope="module")
def lm():
    torch.manual_seed(0)
    return MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=VOCABULARY))


def chosen(lm, logits_rw, change=lambda logits: logits, **options):
    """Return the token that `generate` chooses for each row of these logits, after a change."""
    rows = iter(logits_rw)
    prompts = [[1]] * len(logits_rw)

    def replaced(new_ids, logits_w):
        return change(next(rows))

    found = generate(lm, prompts, max_new_tokens=1, seed=3, processors=replaced, **options)
    return [token for [token] in found]


@pytest.mark.parametrize("k", [1, 7, 40, 254, 255, 256, 299])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
@pytest.mark.parametrize("left", [VOCABULARY, 2])
def test_few_candidates_are_drawn_from_as_all_are(lm, k, top_p, min_p, left):
    """Top-k looks at k candidates; cut from the whole vocabulary, the same token is drawn."""
    logits_rw = randn(ROWS, VOCABULARY, seed=k, dtype=torch.float32)
    logits_rw[:, left:] = -math.inf
    logits_rw[0, :9] = logits_rw[0].max()  # nine tie with the seventh
    options = {"temperature": 0.7, "top_p": top_p, "min_p": min_p}
    expected = chosen(lm, logits_rw, lambda logits_w: keep_top_k(logits_w, k), **options)
    assert chosen(lm, logits_rw, top_k=k, **options) == expected


def test_draws_follow_the_filters(lm):
    """A token that top-k, top-p and min-p remove is never drawn; all others are."""
    logits_w = randn(VOCABULARY, seed=1, dtype=torch.float32)
    options = {"temperature": 2.0, "top_k": 12, "top_p": 0.8, "min_p": 0.1}
    ids = set(chosen(lm, logits_w.expand(2000, -1), **options))
    assert ids == set(_kept(logits_w, **options))


def test_equal_candidates_at_the_border_of_a_nucleus(lm):
    """Of four equal tokens, half the mass is the first two, whoever ranks them."""
    logits_w = torch.full((VOCABULARY,), -10.0)
    logits_w[[7, 90, 130, 200]] = 2.0
    options = {"temperature": 1.0, "top_k": 4, "top_p": 0.5}
    assert set(chosen(lm, logits_w.expand(100, -1), **options)) == {7, 90}
    assert _kept(logits_w, **options) == [7, 90]


def test_greedy_takes_the_first_of_the_largest(lm):
    """Equal logits give the smallest id."""
    logits_w = torch.zeros(VOCABULARY)
    logits_w[[60, 70, 290]] = 1.0
    assert chosen(lm, logits_w.expand(2, -1)) == [60, 60]


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 1e-50},
        {"top_p": 1e-300, "top_k": 3},
        {"temperature": 1e39},
        {"temperature": 1e300, "top_p": 0.5},
        {"temperature": 1.1e-7},
        {"frequency_penalty": 1e300},
        {"presence_penalty": -1e39},
    ],
)
@pytest.mark.parametrize("factor", [1.0, 1e33])
def test_extreme_options_choose_from_what_is_left(lm, options, factor):
    """Whatever overflows, the token is one that the processor left."""
    logits_w = factor * randn(VOCABULARY, seed=1, dtype=torch.float32)
    logits_w[10:] = -math.inf
    ids = chosen(lm, logits_w.expand(20, -1), **{"temperature": 1.0, **options})
    assert max(ids) < 10


def test_default_dtype_changes_no_draw(lm):
    """One seed, one text, whatever torch makes by default."""
    logits_rw = randn(ROWS, VOCABULARY, seed=4, dtype=torch.float32)
    want = chosen(lm, logits_rw, temperature=1.0)
    before = torch.get_default_dtype()
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            assert chosen(lm, logits_rw, temperature=1.0) == want
        finally:
            torch.set_default_dtype(before)


def test_numbers_are_even_and_unrelated():
    """Seeds and places give numbers that fill 0 to 1 and do not follow each other."""
    numbers = torch.tensor([[uniform(seed, place) for place in range(200)] for seed in range(50)])
    assert 0 <= numbers.min() < 1e-3
    assert 1 - 1e-3 < numbers.max() < 1
    shares = torch.histc(numbers, 10, 0, 1) / numbers.numel()
    assert (shares - 0.1).abs().max() < 0.015
    for one, other in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        assert torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].abs() < 0.03


def _kept(logits_w, **options):
    left_w = restrict(logits_w, SamplingConfig(**options))
    return left_w.isfinite().nonzero().flatten().tolist()
