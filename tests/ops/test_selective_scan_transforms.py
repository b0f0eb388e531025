"""The selective scan under gradcheck, vmap, the compiler, and on meta tensors."""

import pytest
import torch
from selective_scan_cases import NO_PACK, fast, make, no_ending

from anymamba.ops.selective_scan import selective_scan
from anymamba.ops.selective_scan.schema import SELECTIVE_SCAN
from laws import assert_same, assert_ways_agree, randn


@pytest.mark.parametrize(("b_form", "c_form"), [("token", "constant"), ("constant", "grouped")])
def test_gradients_equal_finite_differences(b_form, c_form):
    """First and second derivatives pass gradcheck in float64."""
    inputs = make(3, batch=1, channels=2, states=2, b_form=b_form, c_form=c_form)
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(fast, leaves)
    assert torch.autograd.gradgradcheck(fast, leaves)


def test_packed_gradients_equal_finite_differences():
    """First and second derivatives of a packed row pass gradcheck, an empty sequence included."""
    borders = torch.tensor([0, 2, 2, 3])
    leaves = [x.requires_grad_() for x in make(3, batch=1, channels=2, states=1, rows=3)]

    def packed(*args):
        return fast(*args, cu_seqlens=borders)

    assert torch.autograd.gradcheck(packed, leaves)
    assert torch.autograd.gradgradcheck(packed, leaves)


@pytest.mark.parametrize("mapped", [(0, 1, 2, 3, 4, 5, 6), (0, 3), (2,), (4, 6)])
@pytest.mark.parametrize(("b_form", "c_form"), [("token", "grouped"), ("constant", "token")])
def test_vmap_equals_loop(b_form, c_form, mapped):
    """Mapping over any of the inputs equals a loop: values and gradients."""
    base = make(5, b_form=b_form, c_form=c_form)
    inputs = [
        torch.stack([x, 0.5 * x, 0.3 * x]) if place in mapped else x for place, x in enumerate(base)
    ]
    in_dims = tuple(0 if place in mapped else None for place in range(len(base)))

    def loop(*args):
        rows = [
            fast(*(x[row] if place in mapped else x for place, x in enumerate(args)))
            for row in range(3)
        ]
        return [torch.stack(results) for results in zip(*rows, strict=True)]

    def mapped_call(*args):
        return torch.vmap(lambda *x: tuple(fast(*x)), in_dims=in_dims)(*args)

    assert_ways_agree(loop, mapped_call, inputs)


def test_vmap_of_grad_equals_loop():
    """Per-sample gradients by vmap(grad) equal a loop."""
    inputs = make(6, batch=1)
    inputs[0] = randn(3, 1, 6, 6, seed=8)

    def loss(u, *rest):
        y, final = fast(u, *rest)
        return y.square().sum() + final.square().sum()

    gradients = torch.func.grad(loss, argnums=(0, 2, 3))
    actual = torch.vmap(gradients, in_dims=(0, *[None] * 6))(*inputs)
    for row in range(3):
        for expected, found in zip(gradients(inputs[0][row], *inputs[1:]), actual, strict=True):
            assert_same(expected, found[row], "grad")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("b_form", "c_form"), [("grouped", "constant"), ("constant", "grouped")])
def test_operators_pass_opcheck(b_form, c_form, packed):
    """Schema, fake and bodies agree for the forward and the backward operator."""
    u, dt, a, b, c, skip, initial = make(
        5, batch=1, b_form=b_form, c_form=c_form, rows=2 if packed else 1
    )
    u = u.mT.contiguous().mT
    tables = NO_PACK
    if packed:
        tables = (
            torch.tensor([0, 2, 5]),
            torch.tensor([0, 0, 1, 1, 1]),
            torch.tensor([0, 1, 0, 1, 2]),
        )
    flags = (b.dim() == 2, c.dim() == 2, None)
    ending = (skip, randn(1, 5, 6, seed=10)) if packed else no_ending(u)
    arguments = (u, dt, a, b, c, initial, *ending, *flags, *tables, "portable")
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(SELECTIVE_SCAN.fwd_op.default, arguments, test_utils=tests)
    heads = (randn(1, 5, 6, seed=8), randn(*initial.shape, seed=9))
    torch.library.opcheck(SELECTIVE_SCAN.bwd_op.default, (*heads, *arguments), test_utils=tests)


def test_compiles_once_for_all_lengths():
    """torch.compile(fullgraph) over 20 lengths makes at most 3 graphs, with equal results."""
    torch._dynamo.reset()
    graphs = []
    eager = torch._dynamo.lookup_backend("aot_eager")

    def count(graph, inputs):
        graphs.append(graph)
        return eager(graph, inputs)

    compiled = torch.compile(selective_scan, fullgraph=True, backend=count)
    for length in range(2, 22):
        inputs = make(length)
        assert_ways_agree(fast, compiled, inputs)
    assert 1 <= len(graphs) <= 3
    torch._dynamo.reset()


def test_compiled_packed_equals_eager():
    """A packed call compiles into one graph and gives the eager results."""
    torch._dynamo.reset()
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    borders = torch.tensor([0, 3, 3, 9])

    def run(way):
        return lambda *args: way(*args, cu_seqlens=borders)

    assert_ways_agree(run(fast), run(compiled), make(9, batch=1, rows=3))
    torch._dynamo.reset()


def test_runs_on_meta():
    """Shapes and dtypes come out of meta tensors, forward and backward, packed too."""
    inputs = make(20, batch=1, dtype=torch.bfloat16, rows=2)
    leaves = [x.to("meta").requires_grad_() for x in inputs]
    for borders in (None, torch.tensor([0, 5, 20])):
        if borders is None:
            leaves[6] = torch.empty(1, 6, 4, device="meta", requires_grad=True)
        else:
            leaves[6] = torch.empty(2, 6, 4, device="meta", requires_grad=True)
        y, final = fast(*leaves, cu_seqlens=borders)
        assert (y.shape, y.dtype, y.device.type) == ((1, 20, 6), torch.bfloat16, "meta")
        assert (final.shape, final.dtype) == (leaves[6].shape, torch.float32)
        for leaf, grad in zip(
            leaves, torch.autograd.grad(y.sum() + final.sum(), leaves), strict=True
        ):
            assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
