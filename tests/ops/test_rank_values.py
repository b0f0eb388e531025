"""Laws of the values of ranks: one projected vector, weighted for each rank."""

import pytest
import torch
from torch import Tensor

from anymamba.errors import BackendError, DtypeError, ShapeError
from anymamba.ops import rank_values
from anymamba.ops.ranks import native
from kernels import NATIVE, PRECISIONS, running
from laws import assert_same, assert_ways_agree, randn

KINDS = pytest.mark.parametrize("kind", NATIVE)


def inputs(rows: int, ranks: int, heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Return projected values, and weights in the wider dtype, stored as the block stores them."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [
        randn(rows, heads, width, seed=1, dtype=dtype),
        randn(heads, ranks, width, seed=2, dtype=wide).transpose(0, 1),
    ]


def way(impl: str):
    return lambda x, weight: [rank_values(x, weight, impl=impl)]


@PRECISIONS
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (5, 2, 3, 5), (33, 4, 5, 30), (70, 3, 2, 16)])
def test_every_way_equals_the_reference(shape, dtype):
    """Values and gradients, odd widths, one rank and several."""
    assert_ways_agree(way("reference"), way("auto"), inputs(*shape, dtype))


@pytest.mark.parametrize("impl", ["auto", "portable", "reference"])
def test_no_rows_give_no_values(impl):
    """An empty sequence keeps its axes, and has a gradient of zeros."""
    x_shp, weight_mhp = inputs(0, 3, 2, 4, torch.float32)
    weight_mhp.requires_grad_()
    y_smhp = rank_values(x_shp, weight_mhp, impl=impl)
    assert y_smhp.shape == (0, 3, 2, 4)
    (grad,) = torch.autograd.grad(y_smhp.sum(), weight_mhp)
    assert torch.equal(grad, torch.zeros_like(weight_mhp))


@pytest.mark.parametrize("impl", ["auto", "portable", "reference"])
def test_no_ranks_are_refused(impl):
    """By everybody alike."""
    with pytest.raises(ShapeError, match="at least one rank"):
        rank_values(torch.ones(2, 3, 4), torch.ones(0, 3, 4), impl=impl)


@KINDS
def test_half_types_are_rounded_once(kind):
    """Products of the widened numbers, rounded; sums of gradients in float32."""
    x_shp, weight_mhp = inputs(40, 4, 3, 37, torch.bfloat16)
    with running(kind):
        got = rank_values(x_shp, weight_mhp, impl="native")
        above = randn(40, 4, 111, seed=3, dtype=torch.bfloat16)
        grads = native.backward(above, x_shp.flatten(1), weight_mhp.flatten(1))
    assert torch.equal(got, (x_shp.float().unsqueeze(1) * weight_mhp).bfloat16())
    want = (above.double() * weight_mhp.flatten(1).double()).sum(1).bfloat16()
    assert_same(want, grads[0], "grad")
    want = (above.double() * x_shp.flatten(1).double().unsqueeze(1)).sum(0).float()
    assert_same(want, grads[1], "grad")


@KINDS
def test_results_do_not_depend_on_threads(kind):
    """Values and gradients are the same bits on 1, 2 and 5 threads."""
    before, results = torch.get_num_threads(), []
    x_sv, weight_mv = (t.flatten(1) for t in inputs(150, 3, 5, 60, torch.bfloat16))
    above = randn(150, 3, 300, seed=3, dtype=torch.bfloat16)
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        with running(kind):
            forward = native.forward(x_sv, weight_mv)
            results.append([*forward, *native.backward(above, x_sv, weight_mv)])
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(want, got) for want, got in zip(results[0], other, strict=True))


@KINDS
def test_views_equal_their_copies(kind):
    """A slice of a projection gives the bits of a copy."""
    wide, weight_mhp = inputs(21, 3, 4, 60, torch.float32)
    view, weight_mhp = wide[..., 7:48], weight_mhp[..., 7:48]
    with running(kind):
        results = [rank_values(x, weight_mhp, impl="native") for x in (view, view.contiguous())]
    assert torch.equal(*results)


def test_gradients_equal_finite_differences():
    """First and second derivatives."""
    leaves = [x.requires_grad_() for x in inputs(3, 2, 2, 3, torch.float64)]
    assert torch.autograd.gradcheck(rank_values, leaves)
    assert torch.autograd.gradgradcheck(rank_values, leaves)


@PRECISIONS
def test_transforms_equal_eager(dtype):
    """vmap over values and over weights, and a compiled call."""
    x, weight = inputs(3, 2, 4, 5, dtype)
    assert_same(rank_values(x, weight), torch.vmap(lambda row: rank_values(row, weight))(x))
    weights = torch.stack([weight, 2 * weight, 3 * weight])
    want = torch.stack([rank_values(a, b) for a, b in zip(x, weights, strict=True)])
    assert_same(want, torch.vmap(rank_values)(x, weights))
    torch._dynamo.reset()
    traced = torch.compile(way("auto"), backend="aot_eager", fullgraph=True)
    assert_ways_agree(way("reference"), traced, [x, weight])


@pytest.mark.parametrize("kernel", ["portable"])
def test_operators_obey_their_schemas(kernel):
    """Bodies, fakes and schemas of the registered operators agree."""
    x_sv, weight_mv = (t.flatten(1) for t in inputs(5, 2, 3, 4, torch.bfloat16))
    ops = torch.ops.anymamba
    torch.library.opcheck(ops.rank_values_fwd.default, (x_sv, weight_mv, kernel))
    above = torch.ones(5, 2, 12, dtype=torch.bfloat16)
    torch.library.opcheck(ops.rank_values_bwd.default, (above, x_sv, weight_mv, kernel))


def test_rejects_what_does_not_fit():
    """Each mistake is met at the door."""
    x, weight = inputs(5, 2, 3, 4, torch.float32)
    with pytest.raises(ShapeError, match="x must have the axes"):
        rank_values(x, weight[:, 1:])
    with pytest.raises(ShapeError, match="x must have the axes"):
        rank_values(x, weight[0])
    with pytest.raises(DtypeError):
        rank_values(x, weight.double())
    with pytest.raises(BackendError):
        rank_values(x.double(), weight.double(), impl="native")
