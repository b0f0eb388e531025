"""The selective scan in half types, at extreme decays, and the memory it takes."""

import gc

import pytest
import torch
from selective_scan_cases import FORMS, fast, make, reference

from anymamba.ops.selective_scan import selective_scan_step
from kernels import PRECISIONS
from laws import assert_same, assert_ways_agree, randn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("b_form", FORMS)
def test_half_types_accumulate_in_float32(b_form, dtype):
    """Half-type activations give results near float32, states in float32, gradients in kind."""
    halves = [x.to(dtype) for x in make(65, b_form=b_form)]
    wide = [x.float().requires_grad_() for x in halves]
    leaves = [x.requires_grad_() for x in halves]
    heads = randn(2, 65, 6, seed=8, dtype=dtype), randn(2, 6, 4, seed=9, dtype=torch.float32)
    results = []
    for inputs in (wide, leaves):
        y, final = fast(*inputs)
        loss = (y * heads[0].to(y.dtype)).sum() + (final * heads[1]).sum()
        grads = torch.autograd.grad(loss, inputs)
        results.append((y.detach(), final.detach(), grads))
    (y_wide, final_wide, grads_wide), (y, final, grads) = results
    assert y.dtype == dtype
    assert final.dtype == torch.float32
    assert_same(y_wide, y)
    assert_same(final_wide, final)
    for expected, actual in zip(grads_wide, grads, strict=True):
        assert actual.dtype == dtype
        assert_same(expected, actual, "grad")


def test_float32_parameters_beside_half_activations():
    """Float32 dt, decay rates, skip and state beside bfloat16 activations keep their precision."""
    u, dt, a, b, c, skip, initial = make(30, dtype=torch.float32)
    narrow = [x.bfloat16() for x in (u, b, c)]
    expected = fast(narrow[0].float(), dt, a, *(x.float() for x in narrow[1:]), skip, initial)
    actual = fast(narrow[0], dt, a, *narrow[1:], skip, initial)
    assert actual.y_bsi.dtype == torch.bfloat16
    assert torch.equal(expected.y_bsi.bfloat16(), actual.y_bsi)
    assert torch.equal(expected.final_bir, actual.final_bir)


def test_autocast_does_not_lower_precision():
    """Under bfloat16 autocast the results and gradients are bit for bit those without."""
    results = []
    for enabled in (False, True):
        leaves = [x.requires_grad_() for x in make(33, dtype=torch.float32)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y, final = fast(*leaves)
            step = selective_scan_step(
                *(leaves[k][:, 0] if k in (0, 1, 3, 4) else leaves[k] for k in range(7))
            )
            grads = torch.autograd.grad(y.sum() + final.sum(), leaves)
        results.append([y, final, *step, *grads])
    for expected, actual in zip(*results, strict=True):
        assert expected.dtype == actual.dtype == torch.float32
        assert torch.equal(expected, actual)


@PRECISIONS
def test_strong_decays_stay_finite(dtype):
    """Log-decay sums of thousands, single steps of hundreds, give the reference's gradients."""
    inputs = make(65, dtype=dtype)
    inputs[1] = inputs[1] * 20
    inputs[2] = inputs[2] * 50
    assert float((inputs[1][..., None] * inputs[2]).min()) < -700
    assert_ways_agree(reference, fast, inputs)


def test_zero_inputs_give_zero_outputs_and_finite_gradients():
    """With everything zero the outputs vanish and every gradient is finite."""
    leaves = [torch.zeros_like(x).requires_grad_() for x in make(18)]
    y, final = fast(*leaves)
    assert not y.any()
    assert not final.any()
    for grad in torch.autograd.grad(y.sum() + final.sum(), leaves):
        assert grad.isfinite().all()


def test_long_memory_does_not_drift_in_float32():
    """Decays near one over 1000 tokens stay within float32 tolerance of float64."""
    inputs = make(1000, batch=1)
    inputs[1] = inputs[1] * 1e-3
    expected = fast(*inputs)
    actual = fast(*(x.float() for x in inputs))
    assert_same(expected.y_bsi, actual.y_bsi)
    assert_same(expected.final_bir, actual.final_bir)


@pytest.mark.parametrize("b_form", ["token", "constant"])
def test_memory_does_not_hold_the_states_of_all_tokens(b_form):
    """Forward and backward allocate far less than one tensor over (b, s, i, r)."""
    from torch.profiler import ProfilerActivity, profile

    inputs = make(2048, batch=1, channels=64, states=16, b_form=b_form, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in inputs]
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        y, final = fast(*leaves)
        kept = [y, final, *torch.autograd.grad(y.sum() + final.sum(), leaves)]
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    states = 2048 * 64 * 16 * 4
    assert peak - sum(x.nbytes for x in kept) < 0.5 * states


def test_backward_saves_only_the_inputs():
    """Autograd holds no tensor that is not an input or made of inputs without a state axis."""
    leaves = [x.requires_grad_() for x in make(64, channels=8, states=16)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        fast(*leaves)
    assert max(x.numel() for x in saved) <= 2 * 64 * 16
