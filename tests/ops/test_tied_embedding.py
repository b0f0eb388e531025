"""Laws of a tied embedding: one weight, looked up and multiplied with, and one gradient."""

import pytest
import torch
import torch.nn.functional as F

from anymamba.ops import head_cross_entropy, tied_embedding
from laws import assert_same, assert_ways_agree, randn

# A token that comes twice, one that is only looked up, one that is only a target.
IDS = torch.tensor([[3, 3, 0], [5, 10, 3]])
TARGETS = torch.tensor([4, -100, 0, 10, 5, 5])
WEIGHT = (11, 4)


def apart(weight_wd):
    """Return rows and loss as torch computes them, each use of the weight by itself."""
    rows_bsd = F.embedding(IDS, weight_wd)
    logits_sw = F.linear(rows_bsd.tanh().flatten(0, 1), weight_wd)
    return [rows_bsd, F.cross_entropy(logits_sw, TARGETS, reduction="sum")]


def tied(weight_wd):
    """Return the same with both uses tied."""
    rows_bsd, head_wd = tied_embedding(IDS, weight_wd)
    loss = head_cross_entropy(rows_bsd.tanh().flatten(0, 1), head_wd, TARGETS, rows=2)
    return [rows_bsd, loss]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tied_equals_apart(dtype):
    """Rows, loss, and the one gradient."""
    assert_ways_agree(apart, tied, [randn(*WEIGHT, seed=1, dtype=dtype)])


@pytest.mark.parametrize("ids", [torch.tensor(3), torch.tensor([3, 0, 3])])
def test_ids_have_any_shape(ids):
    """Their rows' gradients are added to the head's."""
    weight_wd = randn(*WEIGHT, seed=1, dtype=torch.float32).requires_grad_()
    rows, head_wd = tied_embedding(ids, weight_wd)
    targets = torch.ones(max(1, ids.numel()), dtype=torch.int64)
    loss = head_cross_entropy(rows.reshape(-1, 4), head_wd, targets)
    plain = F.embedding(ids, weight_wd)
    logits_sw = F.linear(plain.reshape(-1, 4), weight_wd)
    want = F.cross_entropy(logits_sw, targets, reduction="sum")
    (got_grad,) = torch.autograd.grad(loss + rows.sum(), weight_wd)
    (want_grad,) = torch.autograd.grad(want + plain.sum(), weight_wd)
    assert_same(want_grad, got_grad)


def test_gradients_equal_finite_differences():
    """First and second derivatives; the second ones find the first unchanged."""
    weight_wd = randn(*WEIGHT, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(tied, [weight_wd], nondet_tol=1e-12)
    assert torch.autograd.gradgradcheck(tied, [weight_wd])


@pytest.mark.parametrize("used", ["rows", "head"])
def test_one_use_alone_has_its_gradient(used):
    """The other use adds nothing."""
    weight_wd = randn(*WEIGHT, seed=1).requires_grad_()
    rows_bsd, head_wd = tied_embedding(IDS, weight_wd)
    want = F.embedding(IDS, weight_wd) if used == "rows" else weight_wd
    grads = [
        torch.autograd.grad(x.square().sum(), weight_wd)[0]
        for x in (want, rows_bsd if used == "rows" else head_wd)
    ]
    assert_same(*grads)


def test_a_graph_can_be_walked_twice():
    """The second backward gives what the first gave, and leaves that alone."""
    weight_wd = randn(*WEIGHT, seed=1, dtype=torch.float32).requires_grad_()
    loss = tied(weight_wd)[1]
    (first,) = torch.autograd.grad(loss, weight_wd, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, weight_wd)
    assert torch.equal(first, kept)
    assert_same(first, second)


def test_autocast_gives_float32_gradients():
    """Rows are float32, products bfloat16, and the gradient is the weight's."""
    weight_wd = randn(*WEIGHT, seed=1, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        rows_bsd, loss = tied(weight_wd)
    (got,) = torch.autograd.grad(loss, weight_wd)
    (want,) = torch.autograd.grad(apart(weight_wd)[1], weight_wd)
    assert rows_bsd.dtype == got.dtype == torch.float32
    assert_same(want.bfloat16(), got.bfloat16())


def test_traces_equal_eager():
    """A compiler and a transform see formulas."""
    weight_wd = randn(*WEIGHT, seed=1, dtype=torch.float32)
    torch._dynamo.reset()
    traced = torch.compile(tied, backend="aot_eager", fullgraph=True)
    assert_ways_agree(apart, traced, [weight_wd])
    got = torch.func.grad(lambda w: tied(w)[1])(weight_wd)
    assert_same(torch.func.grad(lambda w: apart(w)[1])(weight_wd), got)
