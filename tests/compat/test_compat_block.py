"""Laws of `Mamba2Simple`."""

import pytest
import torch
import torch.nn.functional as F

from anymamba.compat import (
    Mamba2Simple,
)
from anymamba.ops import ssd
from compat_inputs import (
    LABELS,
    PIECES,
)
from laws import assert_same, assert_ways_agree, randn


def simple(**options) -> Mamba2Simple:
    """Return a small float64 block with parameters that are not at their initial values."""
    torch.manual_seed(0)
    block = Mamba2Simple(8, d_state=5, headdim=4, dtype=torch.float64, **options)
    for place, parameter in enumerate(block.parameters()):
        parameter.data += 0.3 * randn(*parameter.shape, seed=place + 50)
    return block


def test_block_has_the_official_parameters():
    """Names and shapes of the official state dict, in its order."""
    block = Mamba2Simple(8, d_state=5, headdim=4, ngroups=2, bias=True, learnable_init_states=True)
    assert {name: tuple(p.shape) for name, p in block.state_dict().items()} == {
        "init_states": (4, 4, 5),
        "dt_bias": (4,),
        "A_log": (4,),
        "D": (4,),
        "in_proj.weight": (56, 8),
        "in_proj.bias": (56,),
        "conv1d.weight": (36, 1, 4),
        "conv1d.bias": (36,),
        "norm.weight": (16,),
        "out_proj.weight": (8, 16),
        "out_proj.bias": (8,),
    }
    assert all(getattr(block, n)._no_weight_decay for n in ("dt_bias", "A_log", "D"))


def test_block_starts_inside_its_ranges():
    """softplus(dt_bias) and |A| lie where the constructor says; D and the norm are one."""
    block = Mamba2Simple(
        64, headdim=2, dt_min=0.01, dt_max=0.02, A_init_range=(2, 3), conv_init=0.1
    )
    dt, a = F.softplus(block.dt_bias.detach()), block.A_log.detach().exp()
    assert 0.0099 < float(dt.min()) < 0.012 < 0.017 < float(dt.max()) < 0.0201
    assert 1.99 < float(a.min()) < 2.2 < 2.8 < float(a.max()) < 3.01
    assert float(block.conv1d.weight.detach().abs().max()) <= 0.1
    assert bool((block.D == 1).all())


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("length", [1, 9])
def test_block_equals_its_parts(length, whole):
    """Projections, convolution, scan and norm composed by hand; every gradient."""
    block = simple(
        ngroups=2,
        bias=True,
        learnable_init_states=True,
        dt_limit=(0.0, 0.5),
        use_mem_eff_path=not whole,
    )
    names = [name for name, _ in block.named_parameters()]

    def by_hand(u, *parameters):
        p = dict(zip(names, parameters, strict=True))
        projected = F.linear(u, p["in_proj.weight"], p["in_proj.bias"])
        z, xbc, dt = projected.split([16, 36, 4], -1)
        xbc = F.conv1d(
            F.pad(xbc.transpose(1, 2), (3, 0)), p["conv1d.weight"], p["conv1d.bias"], groups=36
        )
        x, b, c = F.silu(xbc).transpose(1, 2).split([16, 10, 10], -1)
        y = ssd(
            x.unflatten(-1, (4, 4)),
            F.softplus(dt + p["dt_bias"]).clamp(0.0, 0.5),
            -p["A_log"].exp(),
            b.unflatten(-1, (2, 5)),
            c.unflatten(-1, (2, 5)),
            p["D"],
            p["init_states"].expand(u.shape[0], -1, -1, -1),
            impl="reference",
        ).y_bshp.flatten(2)
        y = (y * F.silu(z)).unflatten(-1, (-1, 16 if whole else 8))
        y = (y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(-2)
        return [F.linear(y * p["norm.weight"], p["out_proj.weight"], p["out_proj.bias"])]

    def ours(u, *parameters):
        p = dict(zip(names, parameters, strict=True))
        return [torch.func.functional_call(block, p, u)]

    inputs = [randn(2, length, 8, seed=1), *(p.detach() for p in block.parameters())]
    assert_ways_agree(by_hand, ours, inputs)


def test_block_keeps_labelled_sequences_apart():
    """seq_idx equals separate calls, and the learnable state seeds every sequence."""
    block = simple(learnable_init_states=True)
    u = randn(2, 9, 8, seed=1)
    y = block(u, seq_idx=LABELS)
    for row, start, stop in PIECES:
        alone = block(u[row : row + 1, start:stop])
        assert_same(alone.detach()[0], y.detach()[row, start:stop])


def test_block_does_not_bypass_a_hooked_submodule():
    """The projections and the norm are called as modules."""
    block, called = simple(), []
    for name in ("in_proj", "norm", "out_proj"):
        block.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    block(randn(1, 3, 8, seed=1))
    assert called == ["in_proj", "norm", "out_proj"]


def test_block_runs_in_bfloat16():
    """Parameters of half precision beside a float32 D, close to the same block in float64."""
    block = simple(ngroups=2)
    u = randn(2, 65, 8, seed=1)
    expected = block(u).detach()
    assert Mamba2Simple(8, headdim=4, dtype=torch.bfloat16).D.dtype == torch.float32
    y = block.to(torch.bfloat16)(u.bfloat16())
    assert y.dtype == torch.bfloat16
    assert_same(expected, y.detach())
