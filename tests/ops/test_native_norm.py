"""Laws of the CPU kernels of the norms: threads, memory, odd sizes, extremes."""

import pytest
import torch
from torch import Tensor

from anymamba.errors import BackendError
from anymamba.ops import accumulate_dtype
from anymamba.ops.norm import add_rms_norm, gated_rms_norm, rms_norm
from kernels import NATIVE, running
from laws import assert_ways_agree, randn

pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiled kernels")
KINDS = pytest.mark.parametrize("kind", NATIVE)
HALVES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# One row, odd widths, groups below and above a vector, more rows than a span of the backward.
SIZES = pytest.mark.parametrize(
    ("rows", "width", "group"),
    [(1, 3, 3), (3, 5, 5), (17, 24, 3), (600, 36, 12), (33, 64, 16), (40, 130, 65)],
)


def make(rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Return x, z or residual, and a weight that stays float32."""
    return [
        randn(rows, width, seed=1, dtype=dtype),
        randn(rows, width, seed=2, dtype=dtype),
        randn(width, seed=3, dtype=torch.float32),
    ]


def every_norm(x: Tensor, other: Tensor, weight: Tensor, impl: str, group: int) -> list[Tensor]:
    """Return the result of each norm that has a kernel."""
    gated = {"group_size": group, "impl": impl}
    wide = accumulate_dtype(x.dtype)
    return [
        rms_norm(x, weight, group_size=group, impl=impl),
        gated_rms_norm(x, other, weight, norm_before_gate=True, **gated),
        gated_rms_norm(x, other, weight, norm_before_gate=False, **gated),
        *add_rms_norm(x, other, weight, impl=impl),
        *add_rms_norm(x, other.to(wide), weight, impl=impl),
        add_rms_norm(x, other, weight, residual_in_fp32=True, impl=impl).residual,
        add_rms_norm(x, other, weight, impl=impl).y,
        add_rms_norm(x, None, weight, impl=impl).y,
    ]


def run(tensors: list[Tensor], impl: str = "native", group: int | None = None) -> list[Tensor]:
    """Return all results, and the gradients of each input for fixed heads."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    outputs = every_norm(*leaves, impl, group or tensors[0].shape[-1])
    heads = [randn(*y.shape, seed=9 + place).to(y) for place, y in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, leaves, heads)]


@pytest.fixture
def threads():
    """Set torch's number of threads, and set it back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@KINDS
@HALVES
@SIZES
def test_kernel_equals_the_formula(rows, width, group, dtype, kind):
    """Values and gradients of every norm are those of the formulas in float64."""
    inputs = make(rows, width, dtype)
    for place, y in enumerate(every_norm(*inputs, "portable", group)):
        stored = y.dtype

        def formula(*tensors, place=place, stored=stored):
            wide = (x.double() for x in tensors)
            # Rounded like the kernel's, so that both meet the same gradient from above.
            return [every_norm(*wide, "reference", group)[place].to(stored)]

        def kernel(*tensors, place=place):
            return [every_norm(*tensors, "native", group)[place]]

        with running(kind):
            assert_ways_agree(formula, kernel, inputs)


@KINDS
@HALVES
def test_results_do_not_depend_on_threads(dtype, kind, threads):
    """Outputs and gradients are the same bits on 1, 2 and 5 threads."""
    tensors, results = make(700, 48, dtype), []
    for count in (1, 2, 5, 2):
        threads(count)
        with running(kind):
            results.append(run(tensors, group=12))
    for other in results[1:]:
        assert all(torch.equal(want, got) for want, got in zip(results[0], other, strict=True))


@KINDS
@HALVES
def test_views_equal_their_copies(dtype, kind):
    """Slices of a wide projection, transposed rows and a strided weight give the bits of a copy."""
    wide = randn(2, 7, 61, seed=1, dtype=dtype)
    views = [
        wide[..., 3:27],
        randn(24, 7, 2, seed=2, dtype=dtype).permute(2, 1, 0),
        randn(24, 2, seed=3, dtype=torch.float32)[:, 1],
    ]
    copies = [x.clone(memory_format=torch.contiguous_format) for x in views]
    with running(kind):
        for want, got in zip(run(copies, group=8), run(views, group=8), strict=True):
            assert torch.equal(want, got)


@KINDS
def test_every_element_is_written(kind):
    """Poisoned memory (conftest fills it with NaN) is written all over."""
    assert torch.empty(3).isnan().all()
    with running(kind):
        assert all(result.isfinite().all() for result in run(make(37, 21, torch.float32), group=7))


@KINDS
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e10, 200.0, -200.0])
def test_extreme_numbers_equal_the_portable_code(value, kind):
    """NaN, infinities, large numbers and shut gates come out as in plain torch."""
    tensors = make(5, 9, torch.float32)
    tensors[0][1, 3] = value
    tensors[1][2, 4] = value
    with running(kind):
        for want, got in zip(run(tensors, "portable"), run(tensors), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-4, atol=1e-5)


@KINDS
def test_half_results_are_rounded_once(kind):
    """Bfloat16 results are the float32 ones of the same numbers, rounded."""
    half = make(40, 24, torch.bfloat16)
    with running(kind):
        outputs = every_norm(*half, "native", 8)
        wide = every_norm(half[0].float(), half[1].float(), half[2], "native", 8)
    for got, want in zip(outputs, wide, strict=True):
        assert torch.equal(got, want.to(got.dtype))


@KINDS
def test_the_sum_is_all_that_waits_for_the_backward(kind):
    """A float32 stream is kept as the sum alone; a rounded one as its two terms."""
    x, stream, weight = (t.requires_grad_() for t in make(5, 12, torch.bfloat16))
    saved: list[Tensor] = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with running(kind), keep:
        add_rms_norm(x, stream.float(), weight, impl="native")
        assert len(saved) == 2
        add_rms_norm(x, stream, weight, impl="native")
        assert len(saved) == 2 + 3


@KINDS
def test_native_refuses_second_derivatives(kind):
    """An explicit impl="native" says that its gradient cannot be differentiated again."""
    leaves = [t.requires_grad_() for t in make(5, 12, torch.float32)]
    with running(kind):
        y, _ = add_rms_norm(*leaves, impl="native")
        with pytest.raises(BackendError, match="no second derivative"):
            torch.autograd.grad(y.sum(), leaves, create_graph=True)


@KINDS
def test_second_derivatives_exist_beside_the_kernel(kind):
    """With impl="auto" the gradient can be differentiated again, and is that of plain torch."""
    seconds = []
    for impl in ("portable", "auto"):
        leaves = [x.requires_grad_() for x in make(5, 12, torch.float32)]
        with running(kind):
            y = sum(z.square().sum() for z in every_norm(*leaves, impl, 6))
            grads = torch.autograd.grad(y, leaves, create_graph=True)
            loss = sum(grad.square().sum() for grad in grads)
            seconds.append(torch.autograd.grad(loss, leaves))
    for want, got in zip(*seconds, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_a_lazily_negated_weight_keeps_its_sign():
    """The imaginary part of a conjugate has its sign beside its memory: no kernel reads it."""
    x_sv, weight_v = randn(3, 8, seed=1, dtype=torch.float32), randn(8, seed=2, dtype=torch.float32)
    negated_v = torch.complex(weight_v, weight_v).conj().imag
    assert negated_v.is_neg()
    assert torch.equal(-rms_norm(x_sv, weight_v, impl="portable"), rms_norm(x_sv, negated_v))
    with pytest.raises(BackendError, match="resolve_neg"):
        rms_norm(x_sv, negated_v, impl="native")
