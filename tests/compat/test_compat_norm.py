"""Laws of the norms that stand in for `mamba_ssm`'s."""

import pytest
import torch
import torch.nn.functional as F

from anymamba.compat import (
    RMSNorm,
    RMSNormGated,
    layer_norm_fn,
    layernorm_fn,
    rms_norm_fn,
    rmsnorm_fn,
)
from laws import assert_same, assert_ways_agree, randn


def norm_by_hand(total, weight, bias, rms):
    centred = total if rms else total - total.mean(-1, keepdim=True)
    y = centred * (centred.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize("rms", [True, False])
def test_add_norm_equals_its_formula(rms):
    """A scaled branch, a residual, two norms of one sum, biases; every gradient."""
    inputs = [
        *(randn(2, 3, 8, seed=1), randn(8, seed=2), randn(8, seed=3), randn(2, 3, 8, seed=4)),
        *(randn(8, seed=5), randn(8, seed=6), randn(2, 3, seed=7)),
    ]

    def by_hand(x, weight, bias, residual, weight1, bias1, scale):
        total = x * scale[..., None] + residual
        return (
            norm_by_hand(total, weight, bias, rms),
            norm_by_hand(total, weight1, bias1, rms),
            total,
        )

    def ours(x, weight, bias, residual, weight1, bias1, scale):
        options = {} if rms else {"is_rms_norm": False}
        run = rms_norm_fn if rms else layer_norm_fn
        return run(
            *(x, weight, bias, residual, None, weight1, bias1),
            rowscale=scale,
            prenorm=True,
            **options,
        )

    assert_ways_agree(by_hand, ours, inputs)


def test_second_branch_joins_the_sum():
    """x1 is added before the residual is; only y is returned unless more is asked for."""
    x, x1, residual = (randn(2, 8, seed=s) for s in (1, 2, 3))
    weight = randn(8, seed=4)
    expected = norm_by_hand(x + x1 + residual, weight, None, True)
    assert_same(expected, rms_norm_fn(x, weight, None, residual, x1))


def test_dropout_drops_branches_and_reports_what_it_kept():
    """Kept entries are scaled, the residual is never dropped, masks say what happened."""
    x, x1 = torch.ones(50, 20), torch.full((50, 20), 3.0)
    residual = torch.full((50, 20), 100.0)
    torch.manual_seed(0)
    _, total, mask, mask1 = rms_norm_fn(
        *(x, torch.ones(20), None, residual, x1),
        dropout_p=0.25,
        prenorm=True,
        return_dropout_mask=True,
    )
    assert_same(100 + mask / 0.75 + 3 * mask1 / 0.75, total)
    assert abs(float(mask.float().mean()) - 0.75) < 0.05
    assert not torch.equal(mask, mask1)
    kept = rms_norm_fn(x, torch.ones(20), None, return_dropout_mask=True)[1:]
    assert kept == (None, None)


@pytest.mark.parametrize(
    ("stream", "in_fp32", "expected"),
    [
        (None, False, torch.bfloat16),
        (None, True, torch.float32),
        (torch.bfloat16, True, torch.bfloat16),
        (torch.float32, False, torch.float32),
    ],
)
def test_the_stream_keeps_its_dtype(stream, in_fp32, expected):
    """A given residual decides; only a stream that is opened asks residual_in_fp32."""
    x = randn(2, 8, seed=1, dtype=torch.bfloat16)
    residual = None if stream is None else randn(2, 8, seed=2, dtype=stream)
    y, total = rms_norm_fn(
        *(x, torch.ones(8), None, residual), prenorm=True, residual_in_fp32=in_fp32
    )
    assert (y.dtype, total.dtype) == (torch.bfloat16, expected)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("size", [None, 4])
def test_gated_norm_equals_its_formula(size, rms, before):
    """Groups, bias and gate in both orders; every gradient."""

    def by_hand(x, z, weight, bias):
        x = x if before else x * F.silu(z)
        ones = torch.ones((), dtype=x.dtype)
        y = norm_by_hand(x.unflatten(-1, (-1, size or 8)), ones, None, rms).flatten(-2)
        y = y * weight + bias
        return [y * F.silu(z) if before else y]

    def ours(x, z, weight, bias):
        options = {"z": z, "group_size": size, "norm_before_gate": before}
        if rms:
            return [rmsnorm_fn(x, weight, bias, **options)]
        return [layernorm_fn(x, weight, bias, **options)]

    inputs = [randn(2, 3, 8, seed=1), randn(2, 3, 8, seed=2), randn(8, seed=3), randn(8, seed=4)]
    assert_ways_agree(by_hand, ours, inputs)


def test_norm_modules_call_their_functions():
    """Both modules own one parameter; dropout acts in training only."""
    x, z = randn(2, 8, seed=1), randn(2, 8, seed=2)
    plain, gated = RMSNorm(8, dropout_p=0.5, dtype=torch.float64), RMSNormGated(8, group_size=4)
    assert list(plain.state_dict()) == list(gated.state_dict()) == ["weight"]
    y, total = plain.eval()(x, residual=z, prenorm=True)
    assert_same(rms_norm_fn(x, plain.weight, None, z, eps=1e-5).detach(), y.detach())
    assert_same(x + z, total)
    assert bool((plain.train()(x) == 0).any())
    gated.double()
    expected = rmsnorm_fn(x, gated.weight, None, z, 1e-5, 4)
    assert_same(expected.detach(), gated(x, z).detach())
    assert_same(rmsnorm_fn(x, gated.weight, None, None, 1e-5, 4).detach(), gated(x).detach())
