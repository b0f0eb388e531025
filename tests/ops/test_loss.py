"""Laws of cross-entropy: of rows of logits, and of a head that never holds all of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.errors import BackendError, ConfigError, DeviceError, DtypeError, ShapeError
from anymamba.ops import cross_entropy_rows, head_cross_entropy
from kernels import EVERY_KIND, NATIVE, PRECISIONS, running
from laws import assert_same, assert_ways_agree, randn

TARGETS = torch.tensor([3, -100, 0, 10, 5, 5, -100])
ROWS, ENTRIES, WIDTH = 7, 11, 4
KINDS = pytest.mark.parametrize("kind", EVERY_KIND)


def head_inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return hidden states and a head's weight."""
    return [randn(ROWS, WIDTH, seed=1, dtype=dtype), randn(ENTRIES, WIDTH, seed=2, dtype=dtype)]


def whole(hidden_sd: Tensor, weight_wd: Tensor) -> list[Tensor]:
    """Return the sum from all logits at once."""
    return [F.cross_entropy(F.linear(hidden_sd, weight_wd), TARGETS, reduction="sum")]


def pieces(rows: int = 3, impl: str = "auto"):
    return lambda hidden, weight: [
        head_cross_entropy(hidden, weight, TARGETS, rows=rows, impl=impl)
    ]


@PRECISIONS
def test_rows_equal_reference(dtype):
    """Losses and gradients; rows that do not count have neither."""
    logits_sw = randn(ROWS, ENTRIES, seed=3, dtype=dtype, scale=3.0)
    assert_ways_agree(
        lambda x: [cross_entropy_rows(x, TARGETS, impl="reference")],
        lambda x: [cross_entropy_rows(x, TARGETS)],
        [logits_sw],
    )
    assert_same(
        F.cross_entropy(logits_sw, TARGETS, reduction="none"),
        cross_entropy_rows(logits_sw, TARGETS),
    )


@pytest.mark.parametrize("impl", ["auto", "portable", "reference"])
def test_a_row_that_does_not_count_may_hold_anything(impl):
    """Its loss and its gradient are 0 even beside infinity and NaN."""
    logits_sw = torch.full((2, 3), torch.inf)
    logits_sw[1, 0] = torch.nan
    logits_sw.requires_grad_()
    losses_s = cross_entropy_rows(logits_sw, torch.tensor([-100, -100]), impl=impl)
    losses_s.sum().backward()
    assert losses_s.tolist() == [0, 0]
    assert not logits_sw.grad.any()


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@PRECISIONS
def test_head_in_pieces_equals_the_whole(rows, dtype):
    """Sum and gradients, in pieces of any length, with gradients on and off."""
    inputs = head_inputs(dtype)
    assert_ways_agree(whole, pieces(rows), inputs)
    assert_ways_agree(pieces(rows, "reference"), pieces(rows), inputs)
    assert_same(*whole(*inputs), *pieces(rows)(*inputs))


@KINDS
@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_only_what_is_wanted_gets_a_gradient(wanted, kind):
    """A frozen head or frozen states change nothing for the other."""
    hidden_sd, weight_wd = head_inputs(torch.float32)
    leaf = (hidden_sd if wanted == "hidden" else weight_wd).requires_grad_()
    with running(kind):
        got = torch.autograd.grad(pieces()(hidden_sd, weight_wd)[0], leaf)[0]
    assert_same(torch.autograd.grad(whole(hidden_sd, weight_wd)[0], leaf)[0], got, "grad")


@KINDS
def test_a_graph_can_be_walked_twice(kind):
    """The second backward gives the gradients of the first, whatever factor came from above."""
    leaves = [x.requires_grad_() for x in head_inputs(torch.float32)]
    with running(kind):
        (loss,) = pieces()(*leaves)
        first = torch.autograd.grad(3 * loss, leaves, retain_graph=True)
        kept = [grad.clone() for grad in first]
        second = torch.autograd.grad(3 * loss, leaves)
    for before, want, got in zip(kept, first, second, strict=True):
        assert torch.equal(before, want)
        assert_same(want, got, "grad")


def test_gradients_equal_finite_differences():
    """First and second derivatives of hidden states, weight and logits."""
    inputs = [x.requires_grad_() for x in head_inputs()]
    # The first backward takes the gradients of the pieces, the next ones those of the formula.
    assert torch.autograd.gradcheck(pieces(), inputs, nondet_tol=1e-12)
    assert torch.autograd.gradgradcheck(pieces(), inputs)
    logits_sw = randn(ROWS, ENTRIES, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: cross_entropy_rows(x, TARGETS), [logits_sw])
    assert torch.autograd.gradgradcheck(lambda x: cross_entropy_rows(x, TARGETS), [logits_sw])


@PRECISIONS
def test_transforms_equal_eager(dtype):
    """vmap over logits, torch.func over the head, and a compiled head."""
    logits = randn(3, ROWS, ENTRIES, seed=3, dtype=dtype)
    mapped = torch.vmap(lambda x: cross_entropy_rows(x, TARGETS))(logits)
    assert_same(torch.stack([cross_entropy_rows(x, TARGETS) for x in logits]), mapped)
    inputs = head_inputs(dtype)
    grads = torch.func.grad(lambda *t: pieces()(*t)[0], argnums=(0, 1))(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    for want, got in zip(torch.autograd.grad(whole(*leaves)[0], leaves), grads, strict=True):
        assert_same(want, got, "grad")
    torch._dynamo.reset()
    traced = torch.compile(pieces(), backend="aot_eager", fullgraph=True)
    assert_ways_agree(whole, traced, inputs)


@KINDS
def test_autocast_multiplies_in_its_dtype(kind):
    """Products in bfloat16, sums in float32, gradients in the dtype of the weights."""
    leaves = [x.requires_grad_() for x in head_inputs(torch.float32)]
    with running(kind), torch.autocast("cpu", torch.bfloat16):
        (loss,) = pieces()(*leaves)
    grads = torch.autograd.grad(loss, leaves)
    assert loss.dtype == grads[0].dtype == grads[1].dtype == torch.float32
    (want,) = whole(*leaves)
    assert_same(want.detach().bfloat16(), loss.detach().bfloat16())
    for exact, got in zip(torch.autograd.grad(want, leaves), grads, strict=True):
        assert_same(exact.bfloat16(), got.bfloat16(), "grad")


def test_autocast_leaves_float64_alone():
    """As torch's own linear does."""
    (want,) = whole(*head_inputs())
    with torch.autocast("cpu", torch.bfloat16):
        (loss,) = pieces()(*head_inputs())
    assert_same(want, loss)


@KINDS
def test_rejects_wrong_targets_where_nobody_could_look(kind):
    """A traced or mapped call meets its targets inside the operator, before any memory is read."""
    logits = randn(2, ROWS, ENTRIES, seed=3, dtype=torch.float32)
    targets_s = TARGETS.clone()
    targets_s[2] = 100 * ENTRIES
    torch._dynamo.reset()
    traced = torch.compile(cross_entropy_rows, backend="eager", fullgraph=True)
    with running(kind):
        with pytest.raises((ShapeError, IndexError)):
            traced(logits[0], targets_s)
        with pytest.raises((ShapeError, IndexError)):
            torch.vmap(lambda x: cross_entropy_rows(x, targets_s))(logits)


@pytest.mark.skipif(not NATIVE, reason="no compiled kernels")
def test_native_refuses_a_transform_of_the_head():
    """A transform is given formulas, so an explicit kernel is refused and not passed over."""
    with pytest.raises(BackendError, match="impl='native' cannot serve"):
        torch.func.grad(lambda *x: pieces(impl="native")(*x)[0])(*head_inputs(torch.float32))


@pytest.mark.parametrize("kernel", ["portable"])
def test_operators_obey_their_schemas(kernel):
    """Bodies, fakes and schemas of the registered operators agree."""
    logits_sw = randn(ROWS, ENTRIES, seed=3, dtype=torch.float32)
    ops = torch.ops.anymamba
    torch.library.opcheck(ops.cross_entropy_rows_fwd.default, (logits_sw, TARGETS, kernel))
    arguments = (torch.ones(ROWS), logits_sw, TARGETS, kernel)
    torch.library.opcheck(ops.cross_entropy_rows_bwd.default, arguments)


def test_meta_tensors_give_shapes():
    """Shapes and dtypes can be asked for without memory."""
    hidden_sd, weight_wd = (x.to("meta") for x in head_inputs(torch.bfloat16))
    loss = head_cross_entropy(hidden_sd, weight_wd, TARGETS.to("meta"))
    assert (loss.shape, loss.dtype, loss.device.type) == ((), torch.float32, "meta")


def test_rejects_what_does_not_fit():
    """Each mistake is refused with a message that names the argument."""
    hidden_sd, weight_wd = head_inputs()
    with pytest.raises(ShapeError, match="must share their last axis"):
        head_cross_entropy(hidden_sd, weight_wd[:, 1:], TARGETS)
    with pytest.raises(ShapeError, match="one entry per row"):
        head_cross_entropy(hidden_sd, weight_wd, TARGETS[1:])
    with pytest.raises(DtypeError, match="targets must be int64"):
        head_cross_entropy(hidden_sd, weight_wd, TARGETS.int())
    with pytest.raises(DeviceError, match="targets must be on the device"):
        head_cross_entropy(hidden_sd, weight_wd, TARGETS.to("meta"))
    with pytest.raises(DeviceError, match="targets must be on the device"):
        cross_entropy_rows(hidden_sd.float(), TARGETS.to("meta"))
    for wrong in (-1, ENTRIES):
        targets_s = TARGETS.clone()
        targets_s[2] = wrong
        with pytest.raises(ShapeError, match=f"must lie in 0..10 or be -100; got {wrong}"):
            head_cross_entropy(hidden_sd, weight_wd, targets_s)
    with pytest.raises(ConfigError, match="rows must be positive"):
        head_cross_entropy(hidden_sd, weight_wd, TARGETS, rows=0)
    with pytest.raises(BackendError, match="impl='native' cannot serve"):
        cross_entropy_rows(hidden_sd, TARGETS % WIDTH, impl="native")
    with pytest.raises(DtypeError, match="logits"):
        cross_entropy_rows(hidden_sd.long(), TARGETS)
    with pytest.raises(ShapeError, match="must have the axes"):
        cross_entropy_rows(hidden_sd.unsqueeze(1), TARGETS)
