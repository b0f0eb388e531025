"""Laws of the Mamba-1 functions that stand in for `mamba_ssm`."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.compat import (
    causal_conv1d_fn,
    mamba_inner_fn,
    selective_scan_fn,
    selective_scan_ref,
)
from compat_inputs import (
    inner_inputs,
    scan_inputs,
)
from laws import assert_same, assert_ways_agree, rand, randn


@pytest.mark.parametrize("form", ["constant", "plain", "grouped"])
@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_fast_scan_equals_plain_loop(length, form):
    """Outputs, last state and the gradient of every input, for each form of B and C."""
    run = [
        lambda *x, f=f: f(*x, delta_softplus=True, return_last_state=True)
        for f in (selective_scan_ref, selective_scan_fn)
    ]
    assert_ways_agree(*run, scan_inputs(length, form))


def test_scan_without_last_state_is_the_first_result():
    """The flag changes what is returned, not what is computed; the result is contiguous."""
    inputs = scan_inputs(9, "plain")
    y = selective_scan_fn(*inputs)
    assert torch.equal(y, selective_scan_fn(*inputs, return_last_state=True)[0])
    assert y.is_contiguous()


def complex_sum(u, dt, a_real, a_imag, b_pairs, c_pairs, skip):
    """Write the complex scan as a sum over all pairs of tokens, without a recurrence."""
    a = torch.complex(a_real, a_imag)
    total = dt.cumsum(2)
    gap = total[:, :, :, None] - total[:, :, None, :]
    kernel = torch.exp(gap[..., None] * a[:, None, None])
    causal = torch.ones(dt.shape[2], dt.shape[2]).tril().to(kernel)
    b, c = (
        torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (b_pairs, c_pairs)
    )
    weight = (kernel * c.movedim(1, 2)[:, None, :, None] * b.movedim(1, 2)[:, None, None]).sum(-1)
    y = 2 * ((weight * causal).real * (dt * u)[:, :, None]).sum(-1)
    last = (kernel[:, :, -1] * b.movedim(1, 2)[:, None] * (dt * u)[..., None]).sum(2)
    return y + skip[:, None] * u, torch.view_as_real(last)


@pytest.mark.parametrize("scan", [selective_scan_fn, selective_scan_ref])
def test_complex_scan_equals_sum_over_pairs(scan):
    """Twice the real part of the complex recurrence, B and C as interleaved reals."""
    inputs = [
        randn(2, 4, 9, seed=1),
        rand(2, 4, 9, seed=2),
        -rand(4, 3, seed=3, low=0.1),
        randn(4, 3, seed=4),
        randn(2, 3, 18, seed=5),
        randn(2, 3, 18, seed=6),
        randn(4, seed=7),
    ]

    def actual(u, dt, a_real, a_imag, b, c, skip):
        a = torch.complex(a_real, a_imag)
        y, last = scan(u, dt, a, b, c, skip, return_last_state=True)
        return y, torch.view_as_real(last)

    assert_ways_agree(complex_sum, actual, inputs)


@pytest.mark.parametrize("form", ["constant", "grouped"])
def test_complex_scan_of_real_numbers_is_twice_the_real_scan(form):
    """Constant and grouped coefficients, with D, z, bias and softplus."""
    u, delta, a, b, c, skip, z, bias = scan_inputs(5, form)
    pairs = [
        x if form == "constant" else torch.stack([x, torch.zeros_like(x)], -1).flatten(-2)
        for x in (b, c)
    ]
    expected = selective_scan_fn(u, delta, a, b, 2 * c, skip, z, bias, True)
    actual = selective_scan_fn(u, delta, a.to(torch.complex128), *pairs, skip, z, bias, True)
    assert_same(expected, actual)


def inner_by_hand(inputs: dict[str, Tensor], norms: bool) -> Tensor:
    """Compose a Mamba-1 block from torch's convolution, projections and the plain loop."""
    x, z = inputs["xz"].chunk(2, 1)
    x = F.conv1d(x, inputs["conv1d_weight"], inputs["conv1d_bias"], padding=3, groups=6)
    x = F.silu(x[:, :, :7])
    projected = inputs["x_proj_weight"] @ x
    delta, b, c = projected.split([2, 3, 3], 1)
    delta = inputs["delta_proj_weight"] @ delta
    b, c = b + inputs["B_proj_bias"][:, None], c + inputs["C_proj_bias"][:, None]
    if norms:
        b, c, delta = (
            t * (t.square().mean(1, keepdim=True) + 1e-6).rsqrt() * inputs[name][:, None]
            for t, name in [(b, "b_rms_weight"), (c, "c_rms_weight"), (delta, "dt_rms_weight")]
        )
    y = selective_scan_ref(
        x, delta, inputs["A"], b, c, inputs["D"], z, inputs["delta_bias"], delta_softplus=True
    )
    return y.transpose(1, 2) @ inputs["out_proj_weight"].T + inputs["out_proj_bias"]


@pytest.mark.parametrize("norms", [False, True])
def test_mamba_inner_equals_its_parts(norms):
    """Convolution, projections, norms and scan composed by hand; every gradient."""
    inputs = inner_inputs() | {"B_proj_bias": randn(3, seed=11), "C_proj_bias": randn(3, seed=12)}
    if norms:
        inputs |= {"b_rms_weight": randn(3, seed=13), "c_rms_weight": randn(3, seed=14)}
        inputs["dt_rms_weight"] = randn(6, seed=15)
    assert_ways_agree(
        lambda *x: [inner_by_hand(dict(zip(inputs, x, strict=True)), norms)],
        lambda *x: [mamba_inner_fn(**dict(zip(inputs, x, strict=True)))],
        list(inputs.values()),
    )


def test_mamba_inner_takes_given_coefficients():
    """A constant B takes no rows of x_proj; C is then the last part of the projection."""
    inputs = inner_inputs()
    b = randn(6, 3, seed=20)
    x, z = inputs["xz"].chunk(2, 1)
    x = causal_conv1d_fn(x, inputs["conv1d_weight"][:, 0], inputs["conv1d_bias"], activation="silu")
    projected = inputs["x_proj_weight"][:5] @ x
    y = selective_scan_fn(
        *(x, inputs["delta_proj_weight"] @ projected[:, :2], inputs["A"], b, projected[:, 2:]),
        *(inputs["D"], z, inputs["delta_bias"], True),
    )
    expected = F.linear(y.transpose(1, 2), inputs["out_proj_weight"], inputs["out_proj_bias"])
    inputs["x_proj_weight"] = inputs["x_proj_weight"][:5]
    assert_same(expected, mamba_inner_fn(**inputs, B=b))


def test_mamba_inner_reads_complex_pairs_from_the_projection():
    """Beside a complex A, x_proj holds real and imaginary parts of each state in turn."""
    inputs = inner_inputs(complex_a=True)
    inputs["A"] = torch.complex(inputs["A"], randn(6, 3, seed=21))
    x, z = inputs["xz"].chunk(2, 1)
    x = causal_conv1d_fn(x, inputs["conv1d_weight"][:, 0], inputs["conv1d_bias"], activation="silu")
    delta, b, c = (inputs["x_proj_weight"] @ x).split([2, 6, 6], 1)
    b, c = (t.unflatten(1, (3, 2)).movedim(2, 3).flatten(2) for t in (b, c))
    y = selective_scan_fn(
        *(x, inputs["delta_proj_weight"] @ delta, inputs["A"], b, c, inputs["D"], z),
        *(inputs["delta_bias"], True),
    )
    expected = F.linear(y.transpose(1, 2), inputs["out_proj_weight"], inputs["out_proj_bias"])
    assert_same(expected, mamba_inner_fn(**inputs))
