"""Laws of the gate of the selective scan: y silu(z), on every implementation."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from selective_scan_cases import fast, make, reference

from anymamba.errors import DtypeError, ShapeError
from kernels import EVERY_KIND, PRECISIONS, dtype_of, running
from laws import assert_same, assert_ways_agree, randn


def gated(way, **options):
    """Return `way` with the gate as its last argument."""
    return lambda *args: way(*args[:-1], z_bsi=args[-1], **options)


def gate_after(way, **options):
    """Return `way` without a gate, gated by hand."""

    def run(*args):
        y_bsi, final_bir = way(*args[:-1], **options)
        return y_bsi * F.silu(args[-1]), final_bir

    return run


def make_gated(length: int, **options) -> list[torch.Tensor]:
    inputs = make(length, **options)
    return [*inputs, randn(*inputs[0].shape, seed=8, dtype=inputs[0].dtype)]


@PRECISIONS
@pytest.mark.parametrize("form", ["constant", "token", "grouped"])
@pytest.mark.parametrize("length", [1, 33, 65])
def test_gated_scan_equals_gating_afterwards(length, form, dtype):
    """The gate inside the operator equals one outside: values and every gradient."""
    inputs = make_gated(length, b_form=form, c_form=form, dtype=dtype)
    assert_ways_agree(gate_after(reference), gated(fast), inputs)
    assert_ways_agree(gate_after(fast), gated(fast), inputs)


def test_reference_gates_too():
    """The judge takes the gate as the others do."""
    inputs = make_gated(9)
    assert_ways_agree(gate_after(reference), gated(reference), inputs)


@PRECISIONS
def test_gate_without_skip(dtype):
    """A gate needs no skip."""
    u, dt, a, b, c, _, initial, z = make_gated(40, dtype=dtype)

    def run(way):
        return lambda u, z: way(u, dt, a, b, c, None, initial, z)

    assert_ways_agree(run(gate_after(reference)), run(gated(fast)), [u, z])


@PRECISIONS
def test_gated_packed_equals_separate(dtype):
    """In a packed row every token is gated by its own z."""
    borders = [0, 0, 33, 34, 34, 70]
    inputs = make_gated(70, batch=1, rows=5, dtype=dtype)

    def separate(u, dt, a, b, c, skip, initial, z):
        outputs, finals = [], []
        for row, (left, right) in enumerate(pairwise(borders)):
            if left == right:
                finals.append(initial[row : row + 1])
                continue
            own = slice(left, right)
            y, final = gate_after(reference)(
                *(u[:, own], dt[:, own], a, b[:, own], c[:, own]),
                *(skip, initial[row : row + 1], z[:, own]),
            )
            outputs.append(y)
            finals.append(final)
        return torch.cat(outputs, 1), torch.cat(finals)

    assert_ways_agree(separate, gated(fast, cu_seqlens=torch.tensor(borders)), inputs)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_gated_half_outputs_are_rounded_once(half, kind):
    """Half outputs are the float32 ones of the same numbers, rounded: not before the gate."""
    inputs = [x.to(half) for x in make_gated(40, dtype=torch.float32)]
    with running(kind):
        actual = gated(fast)(*inputs).y_bsi
        expected = gated(fast)(*(x.float() for x in inputs)).y_bsi
    assert_same(expected, actual)
    if kind == "portable" or half is torch.bfloat16:
        assert torch.equal(expected.to(half), actual)


def test_gated_gradients_equal_finite_differences():
    """First and second derivatives pass gradcheck, the gate's included."""
    leaves = [x.requires_grad_() for x in make_gated(3, batch=1, channels=2, states=2)]
    assert torch.autograd.gradcheck(gated(fast), leaves)
    assert torch.autograd.gradgradcheck(gated(fast), leaves)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("mapped", [(7,), (0, 7), (5,), tuple(range(8))])
def test_vmap_over_the_gate_equals_loop(mapped, kind):
    """Mapping over the gate, with or without the rest, equals a loop: values and gradients."""
    base = make_gated(5, dtype=dtype_of(kind))
    inputs = [torch.stack([x, 0.5 * x]) if k in mapped else x for k, x in enumerate(base)]
    in_dims = tuple(0 if k in mapped else None for k in range(len(base)))

    def loop(*args):
        rows = [
            gated(fast)(*(x[row] if k in mapped else x for k, x in enumerate(args)))
            for row in range(2)
        ]
        return [torch.stack(results) for results in zip(*rows, strict=True)]

    def mapped_call(*args):
        return torch.vmap(lambda *x: tuple(gated(fast)(*x)), in_dims=in_dims)(*args)

    with running(kind):
        assert_ways_agree(loop, mapped_call, inputs)


@PRECISIONS
def test_compiled_gate_equals_eager(dtype):
    """A gated call compiles into one graph with the eager results."""
    torch._dynamo.reset()
    compiled = torch.compile(gated(fast), fullgraph=True, backend="aot_eager")
    assert_ways_agree(gated(fast), compiled, make_gated(9, dtype=dtype))
    torch._dynamo.reset()


def test_rejects_a_gate_that_does_not_fit():
    """A gate of another shape or dtype is refused by name."""
    *inputs, z = make_gated(5)
    with pytest.raises(ShapeError, match="z_bsi"):
        fast(*inputs, z_bsi=z[:, :4])
    with pytest.raises(DtypeError, match="z_bsi"):
        fast(*inputs, z_bsi=z.float())
