"""Laws of the CPU kernel of cross-entropy: threads, memory, odd sizes, extremes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.ops import cross_entropy_rows, head_cross_entropy
from anymamba.ops.loss import native
from kernels import NATIVE, running
from laws import assert_same, assert_ways_agree, randn

pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiled kernels")
KINDS = pytest.mark.parametrize("kind", NATIVE)
HALVES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def targets_of(rows: int, entries: int) -> Tensor:
    """Return targets, every fourth of which does not count."""
    random = torch.Generator().manual_seed(7)
    targets_s = torch.randint(0, entries, (rows,), generator=random)
    targets_s[1::4] = -100
    return targets_s


@KINDS
@HALVES
@pytest.mark.parametrize(("rows", "entries"), [(1, 1), (3, 5), (9, 64), (5, 1000), (40, 257)])
def test_kernel_equals_the_formula(rows, entries, dtype, kind):
    """Losses and gradients are those of the formula in float64."""
    logits_sw = randn(rows, entries, seed=1, dtype=dtype, scale=4.0)
    targets_s = targets_of(rows, entries)
    with running(kind):
        assert_ways_agree(
            lambda x: [cross_entropy_rows(x.double(), targets_s, impl="reference").float()],
            lambda x: [cross_entropy_rows(x, targets_s, impl="native")],
            [logits_sw],
        )


@KINDS
@HALVES
def test_gradient_in_place_equals_the_gradient_beside(dtype, kind):
    """Overwriting the logits gives the bits of a gradient in memory of its own."""
    logits_sw, targets_s = randn(13, 77, seed=1, dtype=dtype), targets_of(13, 77)
    with running(kind):
        want_s = native.forward(logits_sw, targets_s)[0]
        want_sw = native.backward(torch.ones(13), logits_sw, targets_s)[0]
        got_s = native.loss_and_gradient_(logits_sw, targets_s)
    assert torch.equal(want_s, got_s)
    assert torch.equal(want_sw, logits_sw)
    assert (got_s[1::4] == 0).all()
    assert (logits_sw[1::4] == 0).all()


@KINDS
@HALVES
def test_head_equals_cross_entropy_of_all_logits(dtype, kind):
    """Sum and gradients in pieces of 4 rows are those of the whole in float64."""
    hidden_sd, weight_wd = randn(30, 12, seed=1, dtype=dtype), randn(50, 12, seed=2, dtype=dtype)
    targets_s = targets_of(30, 50)

    def whole(hidden, weight):
        logits_sw = F.linear(hidden.double(), weight.double())
        return [F.cross_entropy(logits_sw, targets_s, reduction="sum").to(dtype)]

    # The logits have the dtype of the head, so no more digits than that are promised.
    def pieces(hidden, weight):
        return [head_cross_entropy(hidden, weight, targets_s, rows=4, impl="native").to(dtype)]

    with running(kind):
        assert_ways_agree(whole, pieces, [hidden_sd, weight_wd])
        with torch.no_grad():
            assert_same(*whole(hidden_sd, weight_wd), *pieces(hidden_sd, weight_wd))


@KINDS
def test_results_do_not_depend_on_threads(kind):
    """Losses and gradients are the same bits on 1, 2 and 5 threads."""
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        logits_sw = randn(50, 333, seed=1, dtype=torch.float32)
        with running(kind):
            results.append((native.loss_and_gradient_(logits_sw, targets_of(50, 333)), logits_sw))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(want, got) for want, got in zip(results[0], other, strict=True))


@KINDS
def test_views_equal_their_copies(kind):
    """Rows of a wider matrix and columns that lie apart give the bits of a copy."""
    wide = randn(9, 60, seed=1, dtype=torch.float32)
    targets_s = targets_of(9, 41)
    for view in (wide[:, 7:48], randn(41, 9, seed=2, dtype=torch.float32).T):
        with running(kind):
            for want, got in (
                (native.forward(view.contiguous(), targets_s), native.forward(view, targets_s)),
                (
                    native.backward(torch.ones(9), view.contiguous(), targets_s),
                    native.backward(torch.ones(9), view, targets_s),
                ),
            ):
                assert torch.equal(want[0], got[0])


@KINDS
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 500.0])
@pytest.mark.parametrize("place", [2, 10])
def test_extreme_logits_equal_plain_torch(place, value, kind):
    """NaN, infinities and logits far apart come out as in torch, at the target and beside it."""
    logits_sw = randn(3, 11, seed=1, dtype=torch.float32)
    logits_sw[1, place] = value
    targets_s = torch.tensor([0, 2, 10])
    results = []
    for impl in ("portable", "native"):
        leaf = logits_sw.clone().requires_grad_()
        with running(kind):
            losses_s = (
                cross_entropy_rows(leaf, targets_s, impl="native")
                if impl == "native"
                else F.cross_entropy(leaf, targets_s, reduction="none")
            )
            results.append((losses_s.detach(), *torch.autograd.grad(losses_s.sum(), leaf)))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-6)
