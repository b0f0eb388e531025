"""Laws of the CPU kernel of a block's tail and of the gated product: threads, memory, odd sizes."""

import pytest
import torch
from tail_cases import CASES, make, tail
from torch import Tensor

from anymamba.ops import gated_product, gated_tail
from kernels import NATIVE, running
from laws import assert_ways_agree, randn

pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiled kernels")
KINDS = pytest.mark.parametrize("kind", NATIVE)
HALVES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
EVERY_CASE = pytest.mark.parametrize("case", CASES)


def run(case: str, tensors: list[Tensor], impl: str = "native") -> list[Tensor]:
    """Return the output and the gradient of every input for a fixed head."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    (out,) = tail(case, impl)(*leaves)
    head = randn(*out.shape, seed=9).to(out)
    return [out, *torch.autograd.grad(out, leaves, head, materialize_grads=True)]


@pytest.fixture
def threads():
    """Set torch's number of threads, and set it back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@KINDS
@HALVES
@EVERY_CASE
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 5, 2, 3), (1, 40, 4, 8), (1, 600, 3, 11)])
def test_kernel_equals_the_formula(sizes, case, dtype, kind):
    """Values and gradients are those of the formulas in float64, for odd widths and many rows."""
    inputs = make(case, *sizes, dtype=dtype)
    with running(kind):
        assert_ways_agree(
            # Rounded like the kernel's, so that both meet the same gradient from above.
            lambda *t: [tail(case, "reference")(*(x.double() for x in t))[0].to(dtype)],
            tail(case, "native"),
            inputs,
        )


@KINDS
@HALVES
@EVERY_CASE
def test_results_do_not_depend_on_threads(case, dtype, kind, threads):
    """Outputs and gradients are the same bits on 1, 2 and 5 threads."""
    tensors, results = make(case, 1, 700, 2, 12, dtype=dtype), []
    for count in (1, 2, 5, 2):
        threads(count)
        with running(kind):
            results.append(run(case, tensors))
    for other in results[1:]:
        assert all(torch.equal(want, got) for want, got in zip(results[0], other, strict=True))


@KINDS
@HALVES
@EVERY_CASE
def test_views_equal_their_copies(case, dtype, kind):
    """Slices of projections, heads that lie apart and strided weights give the bits of a copy."""
    copies = make(case, 2, 7, 3, 8, dtype=dtype)
    views = []
    for tensor in copies:
        wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 5, dtype=tensor.dtype)
        wide[..., 2:-3] = tensor
        views.append(wide[..., 2:-3])
    weight = torch.zeros(copies[-1].shape[-1], 2, dtype=copies[-1].dtype)
    with running(kind):
        for want, got in zip(run(case, copies), run(case, views), strict=True):
            assert torch.equal(want, got)
        if copies[-1].dim() == 1:
            weight[:, 1] = copies[-1]
            views[-1] = weight[:, 1]
            for want, got in zip(run(case, copies), run(case, views), strict=True):
                assert torch.equal(want, got)


@KINDS
@EVERY_CASE
def test_every_element_is_written(case, kind):
    """Poisoned memory (conftest fills it with NaN) is written all over."""
    assert torch.empty(3).isnan().all()
    with running(kind):
        results = run(case, make(case, 1, 37, 3, 7, dtype=torch.float32))
    assert all(result.isfinite().all() for result in results)


@KINDS
@EVERY_CASE
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e10, 200.0, -200.0])
def test_extreme_numbers_equal_the_portable_code(value, case, kind):
    """NaN, infinities, large numbers and shut gates come out as in plain torch, backward too."""
    tensors = make(case, 1, 5, 2, 3, dtype=torch.float32)
    for place, tensor in enumerate(tensors[:3]):
        tensor[0, place].flatten()[1] = value
    with running(kind):
        for want, got in zip(run(case, tensors, "portable"), run(case, tensors), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-4, atol=1e-5)


@KINDS
@EVERY_CASE
def test_half_results_are_rounded_once(case, kind):
    """Bfloat16 results are the float32 ones of the same numbers, rounded."""
    half = make(case, 1, 20, 2, 12, dtype=torch.bfloat16)
    with running(kind):
        got = run(case, half)
        want = run(case, [x.float() for x in half])
    assert torch.equal(got[0], want[0].to(got[0].dtype))


@KINDS
@EVERY_CASE
def test_second_derivatives_exist_beside_the_kernel(case, kind):
    """With impl="auto" the gradient can be differentiated again, and is that of plain torch."""
    seconds = []
    for impl in ("portable", "auto"):
        leaves = [x.requires_grad_() for x in make(case, 1, 3, 2, 4, dtype=torch.float32)]
        with running(kind):
            loss = tail(case, impl)(*leaves)[0].square().sum()
            grads = torch.autograd.grad(loss, leaves, create_graph=True)
            total = sum(grad.square().sum() for grad in grads)
            seconds.append(torch.autograd.grad(total, leaves))
    for want, got in zip(*seconds, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@KINDS
@HALVES
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 300, 17), (1, 40, 64)])
def test_product_of_halves_equals_the_formula(shape, dtype, kind):
    """Both halves of one projection: values and gradients of `value * silu(gate)`."""
    both = randn(*shape[:-1], 2 * shape[-1], seed=5, dtype=dtype)

    def way(impl):
        return lambda both: [gated_product(*both.chunk(2, dim=-1), impl=impl)]

    with running(kind):
        assert_ways_agree(
            lambda x: [way("reference")(x.double())[0].to(dtype)], way("native"), [both]
        )


@KINDS
def test_skip_per_channel_equals_skip_per_head(kind):
    """A weight per channel that repeats the head's gives the same bits, and its summed gradient."""
    y, x, z, skip, *_ = make("gate", 1, 20, 3, 8, dtype=torch.float32)
    skip_hp = skip.unsqueeze(-1).expand(3, 8).contiguous().requires_grad_()
    skip_h = skip.clone().requires_grad_()
    with running(kind):
        by_channel = gated_tail(y, x, z, skip_hp, impl="native")
        by_head = gated_tail(y, x, z, skip_h, impl="native")
        assert torch.equal(by_channel, by_head)
        grad_hp = torch.autograd.grad(by_channel.sum(), skip_hp)[0]
        grad_h = torch.autograd.grad(by_head.sum(), skip_h)[0]
    torch.testing.assert_close(grad_hp.sum(-1), grad_h)
