"""Laws of the kernel that chooses tokens: it chooses what the filters and the draw choose."""

import math
import os
import subprocess
import sys

import pytest
import torch

from anymamba import settings
from anymamba.errors import ConfigError
from anymamba.generate import SamplingConfig, draw, restrict
from anymamba.ops import TokenChooser, choosing_refusal, native_status
from kernels import NATIVE, running
from laws import randn

pytestmark = pytest.mark.skipif(native_status().variant is None, reason="no compiled kernels here")

ROWS = 24
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 256},
    {"top_k": 257},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 1e-300},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 300, "top_p": 0.7, "min_p": 0.01},
]


@pytest.fixture(params=NATIVE)
def variant(request):
    with running(request.param):
        yield


def chosen(logits_bw, numbers, **options):
    sampling = SamplingConfig(**options)
    chooser = TokenChooser(
        is_greedy=sampling.is_greedy,
        temperature=1.0 if sampling.is_greedy else sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
    found = chooser.choose(logits_bw, numbers)
    assert found is not None
    return found


def numbers_for(seed, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, generator=generator, dtype=torch.float64).tolist()


def assert_may_choose(logits_bw, numbers, ids, **options):
    """A token is right if its mass and that of all before it enclose the number, to rounding.

    Rounded, the sum that reaches p may do so a token sooner or later.
    """
    is_right_b = torch.zeros(len(ids), dtype=torch.bool)
    ids_b1, number_b1 = torch.tensor(ids)[:, None], torch.tensor(numbers)[:, None]
    for factor in (1.0, 1 - 1e-6, 1 + 1e-6):
        top_p = min(1.0, factor * options.get("top_p", 1.0))
        config = SamplingConfig(**options | {"top_p": top_p})
        mass_bw = restrict(logits_bw.double(), config).softmax(-1)
        mass_b1 = mass_bw.gather(-1, ids_b1)
        reached_b1 = mass_bw.cumsum(-1).gather(-1, ids_b1)
        encloses = (reached_b1 - mass_b1 - 1e-5 <= number_b1) & (number_b1 <= reached_b1 + 1e-5)
        is_right_b |= (encloses & (mass_b1 > 0)).squeeze(-1)
    assert is_right_b.all(), is_right_b


@pytest.mark.parametrize("width", [1, 15, 16, 17, 1023, 1024, 1025, 50277])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 20.0])
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_it_chooses_what_filters_and_draw_choose(variant, width, spread, options):
    """Any width, flat and peaked, every filter, on every instruction set."""
    rows = 2 if width > 2000 else ROWS
    logits_bw = spread * randn(rows, width, seed=width, dtype=torch.float32)
    numbers = numbers_for(width, rows)
    options = {"temperature": 0.8, **options}
    found = chosen(logits_bw, numbers, **options)
    assert found.best == logits_bw.amax(-1).tolist()
    assert_may_choose(logits_bw, numbers, found.ids, **options)


def test_it_is_the_draw_of_torch_where_no_number_is_near_a_border():
    """In float32 both ways take the same token, but for numbers at the border of two."""
    logits_bw = randn(400, 3000, seed=5, dtype=torch.float32)
    numbers = numbers_for(5, 400)
    options = {"temperature": 0.9, "top_p": 0.8}
    expected = draw(restrict(logits_bw, SamplingConfig(**options)), torch.tensor(numbers).float())
    same = sum(map(int.__eq__, chosen(logits_bw, numbers, **options).ids, expected.tolist()))
    assert same >= 397


def test_greedy_takes_the_first_of_the_largest(variant):
    """Equal logits give the smallest id, in whole vectors and behind them."""
    logits_bw = torch.zeros(3, 37)
    logits_bw[0, [20, 30]] = 1.0
    logits_bw[1, [35, 36]] = 1.0
    assert chosen(logits_bw, [0.0] * 3).ids == [20, 35, 0]


@pytest.mark.parametrize("place", [0, 16, 36])
def test_nan_and_infinity_are_found(variant, place):
    """The largest logit says so, whatever else is asked for."""
    logits_bw = torch.zeros(3, 37)
    logits_bw[0, place] = math.nan
    logits_bw[1, place] = math.inf
    logits_bw[2] = -math.inf
    for options in ({}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}):
        best = chosen(logits_bw, [0.5] * 3, **options).best
        assert math.isnan(best[0])
        assert best[1:] == [math.inf, -math.inf]


def test_equal_tokens_at_the_borders(variant):
    """Top-k keeps all that tie with its last; of equal tokens top-p keeps the first."""
    logits_w = torch.full((3000,), -10.0)
    logits_w[[7, 90, 1300, 2200]] = 2.0
    numbers = numbers_for(1, 200)
    every = chosen(logits_w.expand(200, -1), numbers, temperature=1.0, top_k=2)
    assert set(every.ids) == {7, 90, 1300, 2200}
    first = chosen(logits_w.expand(200, -1), numbers, temperature=1.0, top_k=4, top_p=0.5)
    assert set(first.ids) == {7, 90}
    flat = chosen(torch.zeros(200, 3000), numbers, temperature=1.0, top_p=0.25)
    assert 740 < max(flat.ids) < 750


@pytest.mark.parametrize("temperature", [1e-7, 1e-3, 1e30])
def test_extreme_temperatures(temperature):
    """Almost greedy, and almost even."""
    logits_bw = randn(200, 64, seed=2, dtype=torch.float32)
    found = chosen(logits_bw, numbers_for(2, 200), temperature=temperature).ids
    if temperature < 1:
        same = sum(map(int.__eq__, found, logits_bw.argmax(-1).tolist()))
        assert same == 200 if temperature == 1e-7 else same >= 195
    else:
        assert len(set(found)) > 55


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_the_first_and_the_last_number(variant, number):
    """They take the first and the last token that has a weight."""
    logits_bw = torch.full((1, 2100), -math.inf)
    logits_bw[0, [3, 1030, 2070]] = torch.tensor([0.0, 1.0, -5.0])
    expected = 3 if number == 0 else 2070
    assert chosen(logits_bw, [number], temperature=1.0).ids == [expected]
    assert chosen(logits_bw, [number], temperature=1.0, top_k=100).ids == [expected]


def test_threads_and_neighbours_change_nothing():
    """A row alone is that row in a batch, on any number of threads."""
    logits_bw = randn(ROWS, 3000, seed=8, dtype=torch.float32)
    numbers = numbers_for(8)
    options = {"temperature": 1.0, "top_p": 0.9}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = chosen(logits_bw, numbers, **options).ids
        torch.set_num_threads(1)
        alone = [
            chosen(logits_bw[row : row + 1], numbers[row : row + 1], **options).ids[0]
            for row in range(ROWS)
        ]
    finally:
        torch.set_num_threads(before)
    assert alone == together


def test_rows_may_lie_apart():
    """The padding of a vocabulary is cut off by a view."""
    wide_bw = randn(3, 80, seed=9, dtype=torch.float32)
    numbers = [0.1, 0.5, 0.9]
    view = chosen(wide_bw[:, :71], numbers, temperature=1.0, top_k=9)
    assert view == chosen(wide_bw[:, :71].contiguous(), numbers, temperature=1.0, top_k=9)


@pytest.mark.parametrize("k", [3, 50, 256])
def test_rising_logits(variant, k):
    """Every token is better than all before it: the slowest case of top-k."""
    logits_bw = torch.arange(2000.0).expand(200, -1)
    found = chosen(logits_bw, numbers_for(3, 200), temperature=1e3, top_k=k).ids
    assert min(found) >= 2000 - k
    assert len(set(found)) >= min(k, 100) - 1


def test_a_chooser_follows_what_it_is_given():
    """Other shapes, numbers of threads and settings; a row of doubles is not read as floats."""
    chooser = TokenChooser(temperature=1.0, top_k=2**70)
    logits_bw = randn(3, 50, seed=4, dtype=torch.float32)
    expected = chooser.choose(logits_bw, [0.1, 0.5, 0.9])
    assert chooser.choose(logits_bw[:1], [0.1]).ids == expected.ids[:1]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert chooser.choose(logits_bw, [0.1, 0.5, 0.9]) == expected
    finally:
        torch.set_num_threads(before)
    assert chooser.choose(logits_bw.double(), [0.1, 0.5, 0.9]) is None
    assert chooser.choose(logits_bw.repeat(2, 1)[::2].T[:3], [0.1, 0.5, 0.9]) is None
    with settings.override(native="off"):
        assert chooser.choose(logits_bw, [0.1, 0.5, 0.9]) is None
    assert chooser.choose(logits_bw, [0.1, 0.5, 0.9]) == expected


@pytest.mark.parametrize("width", [50, 7, 400])
def test_a_tensor_that_comes_again_may_hold_something_else(width):
    """Other values, or other memory of another size."""
    chooser, logits_bw = TokenChooser(top_p=0.9), randn(3, 50, seed=4, dtype=torch.float32)
    chooser.choose(logits_bw, [0.1, 0.5, 0.9])
    logits_bw.mul_(-1)
    expected = TokenChooser(top_p=0.9).choose(logits_bw.clone(), [0.1, 0.5, 0.9])
    assert chooser.choose(logits_bw, [0.1, 0.5, 0.9]) == expected
    logits_bw.data = randn(3, width, seed=5, dtype=torch.float32)
    expected = TokenChooser(top_p=0.9).choose(logits_bw.clone(), [0.1, 0.5, 0.9])
    assert chooser.choose(logits_bw, [0.1, 0.5, 0.9]) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 2.0},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options):
    """The message names the option."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        TokenChooser(**options)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_chooses():
    """A chooser that was used on several threads is usable in a child, which has one."""
    program = """
import os, torch
from anymamba.ops import TokenChooser
torch.set_num_threads(2)
chooser, logits_bw = TokenChooser(temperature=1.0), torch.zeros(4, 3000)
expected = chooser.choose(logits_bw, [0.1, 0.4, 0.6, 0.9])
child = os.fork()
if child == 0:
    os._exit(0 if chooser.choose(logits_bw, [0.1, 0.4, 0.6, 0.9]) == expected else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 0


def test_what_it_refuses():
    """Other dtypes, columns that lie apart, other devices, and installations without kernels."""
    plain = torch.zeros(2, 5)
    assert choosing_refusal(plain) is None
    assert "float32" in choosing_refusal(plain.double())
    assert "contiguous" in choosing_refusal(torch.zeros(5, 2).T)
    assert "CPU" in choosing_refusal(torch.zeros(2, 5, device="meta"))
    with settings.override(native="off"):
        assert choosing_refusal(plain) is not None
