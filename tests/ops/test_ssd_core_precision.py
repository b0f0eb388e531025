"""Numbers of the SSD core: half types, strong decay, and nothing narrower than it should be."""

import pytest
import torch
from ssd_core_cases import by, core_inputs, reference

from anymamba.ops.ssd.recalculated import core_backward
from kernels import is_native
from laws import assert_same, error_of, rand, randn


def test_decay_gradient_of_half_types_is_that_of_float32():
    """Half inputs are widened before the decay's gradient is summed."""
    for dtype in (torch.bfloat16, torch.float16):
        inputs = core_inputs(s=40, m=2, dtype=dtype)
        narrow = [inputs[0], inputs[1].float(), *inputs[2:4], *(x.float() for x in inputs[4:])]
        wide = [x.float() for x in inputs]
        grads = [
            core_backward(
                randn(2, 40, 2, 2, 3, seed=6).float(),
                randn(2, 2, 3, 4, seed=7).float(),
                *x,
                16,
                None,
            )
            for x in (narrow, wide)
        ]
        assert_same(grads[1].da, grads[0].da, "grad")
        assert_same(grads[1].initial, grads[0].initial, "grad")
        assert_same(grads[1].scale, grads[0].scale, "grad")
        assert_same(grads[1].own, grads[0].own, "grad")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_accumulate_in_float32(kind, dtype):
    """Half inputs give the float32 result, y rounded once; the state is float32."""
    if is_native(kind) and dtype == torch.float16:
        pytest.skip("the kernels store float32 and bfloat16; float16 is portable")
    inputs = core_inputs(s=65, h=4, g=2, dtype=dtype)
    inputs = [x.float() if x.dim() == 3 else x for x in inputs]
    y, final = by(kind, 16)(*inputs)
    assert y.dtype == dtype
    assert final.dtype == torch.float32
    want_y, want_final = by(kind, 16)(*(x.float() for x in inputs))
    assert_same(want_final, final)
    assert_same(want_y.to(dtype), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.0, 30.0, 1e6])
def test_strong_decay_and_zero_input_stay_finite(kind, dtype, decay):
    """Log-decay sums of hundreds, enormous single steps and zeros give finite numbers."""
    inputs = core_inputs(s=64, dtype=dtype)
    inputs[1] = -decay * rand(2, 64, 2, seed=9, dtype=torch.float32)
    for scale in (1.0, 0.0):
        leaves = [(x * scale if x.dim() == 5 else x).clone().requires_grad_() for x in inputs]
        y, final = by(kind, 32)(*leaves)
        grads = torch.autograd.grad(y.float().sum() + final.sum(), leaves)
        for tensor in (y, final, *grads):
            assert tensor.isfinite().all()


def test_one_enormous_step_does_not_blur_its_neighbours(kind):
    """After a step that forgets everything, small decays are still exact in float32."""
    inputs = core_inputs(s=64, dtype=torch.float32, decay=0.01)
    inputs[1][:, 20] = -1e6
    wide = [x.double() for x in inputs]
    y, _ = by(kind, 64)(*inputs)
    assert_same(reference()(*wide)[0], y)


@pytest.mark.parametrize("length", [64, 256])
def test_weak_decay_behind_strong_decay_is_exact(kind, length):
    """A stretch of strong decay does not blur what follows, in values or gradients."""
    inputs = core_inputs(1, 256, dtype=torch.float32, decay=0.01)
    inputs[1][:, 20:120] = -60.0
    head = randn(1, 256, 1, 2, 3, seed=8)

    def results(way, tensors):
        leaves = [x.clone().requires_grad_() for x in tensors]
        y, final = way(*leaves)
        loss = (y * head.to(y.dtype)).sum() + final.sum()
        return [y, final, *torch.autograd.grad(loss, leaves)]

    want = results(reference(), [x.double() for x in inputs])
    for expected, actual in zip(want, results(by(kind, length), inputs), strict=True):
        assert error_of(expected, actual) < 2e-6


def test_autocast_does_not_narrow_the_scan(kind):
    """Under bfloat16 autocast, float32 inputs are still computed in float32."""
    inputs = core_inputs(dtype=torch.float32)
    want = reference()(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        y, final = by(kind, 4)(*inputs)
    assert_same(want.y_bsmhp, y)
    assert_same(want.final_bhpr, final)
