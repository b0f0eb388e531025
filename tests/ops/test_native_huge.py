"""The kernels on tensors of more than 2^31 elements: every index is 64 bits wide.

The inputs lie in sparse files, so that they cost address space and a few pages of disk. All numbers
are zero but those of one narrow strip at the far end, which a small call computes again.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anymamba.ops import causal_conv1d, selective_scan, ssd_core
from kernels import NATIVE
from laws import randn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not NATIVE, reason="this installation has no compiled kernels"),
]
LIMIT = 2**31
STRIP = 64
HALF = torch.bfloat16


def sparse(file: Path, *shape: int) -> Tensor:
    """Return zeros of a shape in bfloat16, mapped from a file that holds none of them."""
    count = torch.Size(shape).numel()
    assert count > LIMIT
    storage = torch.UntypedStorage.from_file(str(file), shared=True, nbytes=count * HALF.itemsize)
    return torch.empty(0, dtype=HALF).set_(storage, 0, shape)


def assert_rounded_alike(actual: Tensor, expected: Tensor) -> None:
    """Allow the last bit of bfloat16: the sizes of a call decide where its sums are cut."""
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7)


def assert_far_end(way: Callable[..., Tensor], wide: list[Tensor], rest: list[Tensor]) -> None:
    """Compare the last strip of a huge call with a small call on that strip alone.

    `wide` are mapped tensors whose last axis is cut into strips; the first receives a gradient.
    """
    strips = []
    for place, tensor in enumerate(wide):
        values = randn(*tensor.shape[:-1], STRIP, seed=place + 1).abs().to(HALF)
        tensor[..., -STRIP:] = values
        strips.append(values)
    small = [strips[0].clone().requires_grad_(), *strips[1:]]
    expected = way(*small, *[x[-STRIP:] for x in rest])
    large = [wide[0].requires_grad_(), *wide[1:]]
    actual = way(*large, *rest)
    assert_rounded_alike(actual[..., -STRIP:], expected)
    # Zeros stay zeros: nothing was read or written at a place that wrapped around.
    assert not actual[..., :-STRIP].any()
    (grad_expected,) = torch.autograd.grad(expected, small[0], strips[0])
    (grad_actual,) = torch.autograd.grad(actual, large[0], wide[0].detach())
    assert_rounded_alike(grad_actual[..., -STRIP:], grad_expected)
    assert not grad_actual[..., :-STRIP].any()


def test_convolution(tmp_path):
    """Convolution and its gradient reach the far end of a huge tensor."""
    x_bsv = sparse(tmp_path / "x", 1, 2048, 2**20 + STRIP)
    weight_vk = randn(4, seed=8).expand(x_bsv.shape[-1], 4).to(HALF)

    def way(x, weight):
        return causal_conv1d(x, weight, impl="native").y_bsv

    assert_far_end(way, [x_bsv], [weight_vk])


def test_selective_scan(tmp_path):
    """The scan and its gradient reach the far end of a huge tensor."""
    shape = (1, 2048, 2**20 + STRIP)
    u_bsi, dt_bsi = sparse(tmp_path / "u", *shape), sparse(tmp_path / "dt", *shape)
    a_ir = -torch.ones(1, 1).expand(shape[-1], 1)
    b_bsr = randn(1, shape[1], 1, seed=6).to(HALF)
    c_bsr = randn(1, shape[1], 1, seed=7).to(HALF)

    def way(u, dt, a):
        return selective_scan(u, dt, a, b_bsr, c_bsr, impl="native").y_bsi

    assert_far_end(way, [u_bsi, dt_bsi], [a_ir])


def test_ssd_core(tmp_path):
    """The core and its gradient reach the last head of a huge tensor."""
    length, heads = 2048, 2**14 + 1
    v_bsw = sparse(tmp_path / "v", 1, length, heads * STRIP)
    # One row of decays for every head: an expanded axis takes no memory.
    da_bs1 = -torch.rand(1, length, 1, generator=torch.Generator().manual_seed(5))
    b_bsmgr = randn(1, length, 1, 1, 4, seed=6).to(HALF)
    c_bsmgr = randn(1, length, 1, 1, 4, seed=7).to(HALF)

    def way(v_bsw):
        v_bsmhp = v_bsw.unflatten(-1, (1, -1, STRIP))
        da_bsh = da_bs1.expand(1, length, v_bsmhp.shape[3])
        return ssd_core(v_bsmhp, da_bsh, b_bsmgr, c_bsmgr, impl="native").y_bsmhp.flatten(2)

    assert_far_end(way, [v_bsw], [])
