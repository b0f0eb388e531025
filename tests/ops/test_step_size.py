"""Laws of step sizes: the softplus of projected numbers and a bias, in one pass."""

import pytest
import torch
from torch import Tensor

from anymamba.errors import BackendError, DtypeError, ShapeError
from anymamba.ops import step_size
from anymamba.ops.step_size import native
from kernels import NATIVE, PRECISIONS, running
from laws import assert_same, assert_ways_agree, randn

KINDS = pytest.mark.parametrize("kind", NATIVE)


def inputs(*shape: int, dtype: torch.dtype, scale: float = 8.0) -> list[Tensor]:
    """Return projected numbers, small to large, and a bias."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [
        randn(*shape, seed=1, dtype=dtype, scale=scale),
        randn(shape[-1], seed=2, dtype=wide),
    ]


def way(impl: str):
    return lambda x, bias_v: [step_size(x, bias_v, impl=impl)]


@PRECISIONS
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 5), (70, 16), (33, 300), (0, 4)])
def test_every_way_equals_the_reference(shape, dtype):
    """Values and gradients, odd widths, no rows."""
    assert_ways_agree(way("reference"), way("auto"), inputs(*shape, dtype=dtype))


@KINDS
def test_half_types_give_float32(kind):
    """The kernel's step sizes are those of the widened numbers; gradients have their own dtypes."""
    x_sv, bias_v = inputs(40, 37, dtype=torch.bfloat16)
    with running(kind):
        got_sv = step_size(x_sv, bias_v, impl="native")
        assert got_sv.dtype == torch.float32
        assert_same(step_size(x_sv.double(), bias_v.double()).float(), got_sv)
        above_sv = randn(40, 37, seed=3, dtype=torch.float32)
        grads = native.backward(above_sv, x_sv, bias_v)
    want = (above_sv * (x_sv.float() + bias_v).sigmoid()).to(torch.bfloat16)
    assert_same(want, grads[0], "grad")
    assert grads[1].dtype == torch.float32


@KINDS
def test_kernel_keeps_the_digits_of_small_steps(kind):
    """A relative error of a few units in the last place over the whole range."""
    x_sv = torch.linspace(-100, 100, 4001).view(1, -1)
    with running(kind):
        got_sv = step_size(x_sv, torch.zeros(4001), impl="native")
    want_sv = step_size(x_sv.double(), torch.zeros(4001).double(), impl="reference")
    # Below the smallest normal number there are no such digits to keep.
    normal = want_sv > 1e-37
    error_sv = ((got_sv.double() - want_sv) / want_sv)[normal].abs()
    assert error_sv.max() < 5e-7
    assert (got_sv[~normal] < 2e-37).all()


@KINDS
def test_extremes_equal_plain_torch(kind):
    """NaN and infinities pass as in torch, and so do their gradients."""
    x_sv = torch.tensor([[torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 0.0]])
    for impl in ("native", "portable"):
        with running(kind):
            leaf = x_sv.clone().requires_grad_()
            dt_sv = step_size(leaf, torch.zeros(6), impl=impl)
            (grad_sv,) = torch.autograd.grad(dt_sv, leaf, torch.ones_like(dt_sv))
        assert dt_sv[0, 0].isnan()
        assert grad_sv[0, 0].isnan()
        assert dt_sv[0, 1:5].tolist() == [torch.inf, 0, pytest.approx(3e38), 0]
        assert grad_sv[0, 1:].tolist() == [1, 0, 1, 0, 0.5]


@KINDS
def test_results_do_not_depend_on_threads(kind):
    """Step sizes and gradients are the same bits on 1, 2 and 5 threads."""
    before, results = torch.get_num_threads(), []
    x_sv, bias_v = inputs(150, 300, dtype=torch.bfloat16)
    above_sv = randn(150, 300, seed=3, dtype=torch.float32)
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        with running(kind):
            results.append(
                [*native.forward(x_sv, bias_v), *native.backward(above_sv, x_sv, bias_v)]
            )
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(want, got) for want, got in zip(results[0], other, strict=True))


@KINDS
def test_views_equal_their_copies(kind):
    """A slice of a projection and a transposed matrix give the bits of a copy."""
    wide, bias_v = inputs(21, 60, dtype=torch.float32)
    for view in (wide[:, 7:48], randn(41, 21, seed=2, dtype=torch.float32).T):
        with running(kind):
            results = [native.forward(x, bias_v[:41])[0] for x in (view, view.contiguous())]
        assert torch.equal(*results)


def test_gradients_equal_finite_differences():
    """First and second derivatives."""
    leaves = [x.requires_grad_() for x in inputs(3, 4, dtype=torch.float64, scale=1.0)]
    assert torch.autograd.gradcheck(step_size, leaves)
    assert torch.autograd.gradgradcheck(step_size, leaves)


@PRECISIONS
def test_transforms_equal_eager(dtype):
    """vmap, torch.func and a compiled call."""
    x, bias_v = inputs(3, 5, 7, dtype=dtype)
    want = step_size(x, bias_v)
    assert_same(want, torch.vmap(lambda row: step_size(row, bias_v))(x))
    biases = torch.stack([bias_v, 2 * bias_v, 3 * bias_v])
    mapped = torch.vmap(step_size)(x, biases)
    assert_same(torch.stack([step_size(a, b) for a, b in zip(x, biases, strict=True)]), mapped)
    torch._dynamo.reset()
    traced = torch.compile(way("auto"), backend="aot_eager", fullgraph=True)
    assert_ways_agree(way("reference"), traced, [x, bias_v])


@pytest.mark.parametrize("kernel", ["portable"])
def test_operators_obey_their_schemas(kernel):
    """Bodies, fakes and schemas of the registered operators agree."""
    x_sv, bias_v = inputs(5, 7, dtype=torch.bfloat16)
    ops = torch.ops.anymamba
    torch.library.opcheck(ops.step_size_fwd.default, (x_sv, bias_v, kernel))
    torch.library.opcheck(ops.step_size_bwd.default, (x_sv.float(), x_sv, bias_v, kernel))


def test_rejects_what_does_not_fit():
    """Each mistake is met at the door."""
    x_sv, bias_v = inputs(5, 7, dtype=torch.float32)
    with pytest.raises(ShapeError, match="bias must have one number"):
        step_size(x_sv, bias_v[1:])
    with pytest.raises(DtypeError):
        step_size(x_sv, bias_v.double())
    with pytest.raises(DtypeError):
        step_size(x_sv.int(), bias_v)
    with pytest.raises(BackendError):
        step_size(x_sv.double(), bias_v.double(), impl="native")
