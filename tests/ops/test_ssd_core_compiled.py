"""The SSD core as an operator: schema, fakes, graphs, and shapes without data."""

import pytest
import torch
from ssd_core_cases import ALGORITHMS, KINDS, by, core_inputs

from anymamba.ops.ssd.schema import SSD_CORE
from kernels import NATIVE, dtype_of, running
from laws import assert_same, assert_ways_agree, randn


@pytest.mark.parametrize("kind", ["minimal", *KINDS[2:]], indirect=True)
def test_compiled_code_refuses_bad_borders(kind):
    """Borders are checked under the compiler too, when the graph runs."""
    way = lambda *x: by(kind, 4, False, x[-1])(*x[:-1])  # noqa: E731
    compiled = torch.compile(way, fullgraph=True, backend="eager")
    inputs = core_inputs(1, rows=3, dtype=dtype_of(kind))
    assert_same(
        way(*inputs, torch.tensor([0, 5, 5, 7]))[0],
        compiled(*inputs, torch.tensor([0, 5, 5, 7]))[0],
    )
    with pytest.raises((RuntimeError, ValueError), match="cu_seqlens"):
        compiled(*inputs, torch.tensor([0, 5, 3, 7]))


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed):
    """Schema, fake and bodies of both operators agree."""
    cu_seqlens = torch.tensor([0, 2, 2, 7]) if packed else None
    inputs = core_inputs(1, rows=3 if packed else None)
    grads = [randn(1, 7, 1, 2, 3, seed=6), randn(3 if packed else 1, 2, 3, 4, seed=7)]
    tests = ("test_schema", "test_faketensor")
    for tensors in (inputs, [x.mT.contiguous().mT for x in inputs], [x.bfloat16() for x in inputs]):
        arguments = (*tensors, 4, cu_seqlens, "portable")
        torch.library.opcheck(SSD_CORE.fwd_op, arguments, test_utils=tests)
        torch.library.opcheck(SSD_CORE.bwd_op, (*grads, *arguments), test_utils=tests)


@pytest.mark.parametrize("kind", NATIVE)
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_native(kind, packed):
    """Schema and fake agree with the kernels too."""
    cu_seqlens = torch.tensor([0, 2, 2, 7]) if packed else None
    inputs = core_inputs(1, rows=3 if packed else None, dtype=torch.float32)
    grads = [
        randn(1, 7, 1, 2, 3, seed=6, dtype=torch.float32),
        randn(3 if packed else 1, 2, 3, 4, seed=7, dtype=torch.float32),
    ]
    tests = ("test_schema", "test_faketensor")
    narrow = [x.bfloat16() if x.dim() == 5 else x for x in inputs]
    for tensors in (inputs, narrow):
        arguments = (*tensors, 4, cu_seqlens, "native")
        with running(kind):
            torch.library.opcheck(SSD_CORE.fwd_op, arguments, test_utils=tests)
            heads = (grads[0].to(tensors[0].dtype), grads[1])
            torch.library.opcheck(SSD_CORE.bwd_op, (*heads, *arguments), test_utils=tests)


def test_compiles_once_for_many_lengths(kind):
    """20 lengths need at most 3 graphs, with equal values and gradients."""
    torch._dynamo.reset()
    graphs = 0

    def backend(module, example):
        nonlocal graphs
        graphs += 1
        return torch._dynamo.backends.debugging.aot_eager(module, example)

    way = by(kind, 8)
    compiled = torch.compile(way, fullgraph=True, backend=backend)
    for length in (12, 3, *range(20, 38)):
        assert_ways_agree(way, compiled, core_inputs(s=length, dtype=dtype_of(kind)))
    assert graphs <= 3


def test_runs_on_meta():
    """Shapes flow through every path without data."""
    inputs = [x.to("meta").requires_grad_() for x in core_inputs()]
    for kind in ALGORITHMS:
        y, final = by(kind, 4)(*inputs)
        assert (y.shape, final.shape) == (inputs[0].shape, inputs[4].shape)
        (y.sum() + final.sum()).backward()
