"""Laws of the CPU kernel of the convolution: threads, memory, odd sizes, isolation."""

import pytest
import torch
from torch import Tensor

from anymamba.ops.conv import causal_conv1d
from anymamba.ops.conv.native import backward, forward
from kernels import NATIVE, running
from laws import assert_ways_agree, randn

pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiled kernels")
KINDS = pytest.mark.parametrize("kind", NATIVE)
NAMES = ("y", "last", "x", "window", "weight", "bias")
BORDERS = [0, 0, 1, 4, 4, 255, 258, 600, 600]


def make(
    batch: int, length: int, channels: int, width: int, rows: int | None = None
) -> list[Tensor]:
    """Return x, window, weight and bias in float32."""
    return [
        randn(batch, length, channels, seed=1, dtype=torch.float32),
        randn(rows or batch, channels, width, seed=2, dtype=torch.float32),
        randn(channels, width, seed=3, dtype=torch.float32),
        randn(channels, seed=4, dtype=torch.float32),
    ]


def run(tensors: list[Tensor], cu_seqlens: Tensor | None = None, silu: bool = True) -> list[Tensor]:
    """Return the outputs of the kernel and its gradients for fixed heads."""
    outputs = forward(*tensors, cu_seqlens, silu)
    heads = [randn(*y.shape, seed=9, dtype=torch.float32).to(y.dtype) for y in outputs]
    return [*outputs, *backward(*heads, *tensors, cu_seqlens, silu)]


def conv(impl: str, activation: str | None, cu_seqlens: Tensor | None = None):
    def way(x, window, weight, bias):
        return causal_conv1d(
            x, weight, bias, window, activation=activation, impl=impl, cu_seqlens=cu_seqlens
        )

    return way


@pytest.fixture
def threads():
    """Set torch's number of threads, and set it back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@KINDS
def test_results_do_not_depend_on_threads(kind, threads):
    """Outputs, windows and gradients are the same bits on 1, 2 and 5 threads."""
    tensors = make(2, 600, 300, 4)
    results = []
    for count in (1, 2, 5, 2):
        threads(count)
        with running(kind):
            results.append(run(tensors))
    for other in results[1:]:
        for name, expected, actual in zip(NAMES, results[0], other, strict=True):
            assert torch.equal(expected, actual), name


@KINDS
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 7, 8, 11])
@pytest.mark.parametrize("length", [1, 3, 20])
def test_every_width_equals_reference(length, width, activation, kind):
    """Filters shorter and longer than the sequence, unrolled and counted ones."""
    with running(kind):
        assert_ways_agree(
            conv("reference", activation), conv("native", activation), make(2, length, 5, width)
        )


@KINDS
@pytest.mark.parametrize(("length", "channels"), [(1, 1), (256, 257), (257, 20), (513, 512)])
def test_task_borders_leave_no_trace(length, channels, kind):
    """Lengths and channels around the sizes of a task equal the portable code."""
    with running(kind):
        assert_ways_agree(
            conv("portable", "silu"), conv("native", "silu"), make(1, length, channels, 4)
        )


@KINDS
@pytest.mark.parametrize("width", [1, 4, 9])
def test_packed_equals_reference(width, kind):
    """Empty, short and long sequences across the borders of tasks, each from its own window."""
    borders = torch.tensor(BORDERS)
    tensors = make(1, 600, 9, width, rows=len(BORDERS) - 1)
    with running(kind):
        assert_ways_agree(
            conv("reference", "silu", borders), conv("native", "silu", borders), tensors
        )


@KINDS
def test_packed_sequences_never_meet(kind):
    """NaN in one sequence and its window changes no bit of the others."""
    borders = torch.tensor(BORDERS)
    tensors = make(1, 600, 9, 4, rows=len(BORDERS) - 1)
    with running(kind):
        clean = run(tensors, borders)
        tensors[0][:, 4:255] = torch.nan
        tensors[1][4] = torch.nan
        dirty = run(tensors, borders)
    for name, want, got in zip(NAMES[:4], clean[:4], dirty[:4], strict=True):
        if name in ("y", "x"):
            want[:, 4:255], got[:, 4:255] = 0, 0
        else:
            want[4], got[4] = 0, 0
        assert torch.equal(want, got), name


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_equal_their_copies(kind, dtype):
    """Slices of a wide projection and transposed windows give the bits of a copy."""
    views = [
        randn(2, 70, 61, seed=1, dtype=dtype)[..., 3:27],
        randn(4, 24, 2, seed=2, dtype=dtype).permute(2, 1, 0),
        randn(4, 24, seed=3, dtype=torch.float32).mT,
        randn(24, 2, seed=4, dtype=torch.float32)[:, 1],
    ]
    copies = [x.clone(memory_format=torch.contiguous_format) for x in views]
    with running(kind):
        for name, expected, actual in zip(NAMES, run(copies), run(views), strict=True):
            assert torch.equal(expected, actual), name


@KINDS
@pytest.mark.parametrize("packed", [False, True])
def test_every_element_is_written(kind, packed):
    """Poisoned memory (conftest fills it with NaN) is written all over, empty sequences too."""
    borders = torch.tensor(BORDERS) if packed else None
    tensors = make(1, 600, 21, 4, rows=len(BORDERS) - 1 if packed else 1)
    assert torch.empty(3).isnan().all()
    with running(kind):
        for name, result in zip(NAMES, run(tensors, borders), strict=True):
            assert result.isfinite().all(), name


@KINDS
def test_half_results_are_rounded_once(kind):
    """Bfloat16 results are the float32 ones of the same numbers, rounded."""
    tensors = make(1, 40, 12, 4)
    mixed = [tensors[0].bfloat16(), tensors[1].bfloat16(), *tensors[2:]]
    heads = [randn(*x.shape, seed=9, dtype=torch.bfloat16) for x in mixed[:2]]
    with running(kind):
        halves, wide = (
            [
                *forward(*given, None, True),
                *backward(*(x.to(given[0]) for x in heads), *given, None, True),
            ]
            for given in (mixed, [x.float() for x in mixed])
        )
    for name, half, single in zip(NAMES, halves, wide, strict=True):
        assert torch.equal(half, single.to(half.dtype)), name


@KINDS
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 200.0, -200.0, 3e38])
def test_extreme_tokens_equal_the_portable_code(value, kind):
    """NaN, infinities and saturated activations come out as in plain torch, backward too."""
    tensors = make(1, 9, 3, 4)
    tensors[0][0, 3, 1] = value
    results = []
    for impl in ("portable", "native"):
        leaves = [x.clone().requires_grad_() for x in tensors]
        with running(kind):
            y_bsv, _ = conv(impl, "silu")(*leaves)
            grads = torch.autograd.grad(y_bsv.sum(), leaves)
        results.append([y_bsv.detach(), *grads])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-5)
