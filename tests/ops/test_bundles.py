"""The input bundles: three algorithms, one learnable initial state, the seeds' names."""

import pickle

import pytest
import torch

from anymamba.errors import AnyMambaError, ConfigError
from anymamba.ops import (
    Mamba2SsdInput,
    Mamba3DoubleSsdInput,
    Mamba3SingleSsdInput,
    Mamba3SsdPath,
    SsdPath,
    double_ssd_serial_recalculated,
    single_ssd_serial_recalculated,
    ssd,
    ssd_core,
)
from anymamba.settings import override
from laws import assert_same, assert_ways_agree, rand, randn

KINDS = ["minimal", "serial", "serial_recalculated"]
B, N, L, M, H, P, R = 2, 3, 4, 2, 2, 3, 5


def mamba2_tensors():
    x, b, c = (randn(B, N, L, H, size, seed=seed) for seed, size in ((1, P), (2, R), (3, R)))
    dt, a, d = rand(B, N, L, H, seed=4), -rand(H, seed=5), randn(H, seed=6)
    return [x, dt, a, b, c, d, randn(B, H, P, R, seed=7), randn(H, P, R, seed=8)]


def mamba3_tensors():
    v, b, c = (randn(B, N, L, M, H, size, seed=seed) for seed, size in ((1, P), (2, R), (3, R)))
    return [v, -rand(B, N, L, H, seed=4), b, c]


def states():
    return [randn(B, H, P, R, seed=7), randn(H, P, R, seed=8)]


def double(kind):
    return lambda *x: Mamba3DoubleSsdInput(*x).run(SsdPath(kind))


def single(kind):
    return lambda *x: Mamba3SingleSsdInput(*x).run(SsdPath(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_mamba2_bundle_is_the_scan_from_the_summed_state(kind):
    """Every algorithm adds the learnable initial state to the given one."""

    def scan(x, dt, a, b, c, d, initial, learnable):
        x, dt, b, c = (z.flatten(1, 2) for z in (x, dt, b, c))
        y, final = ssd(x, dt, a, b, c, d, initial + learnable, impl="reference")
        return y.unflatten(1, (N, L)), final

    bundle = lambda *x: Mamba2SsdInput(*x).run(SsdPath(kind))  # noqa: E731
    assert_ways_agree(scan, bundle, mamba2_tensors())


@pytest.mark.parametrize("kind", KINDS)
def test_double_bundle_is_the_core_from_the_summed_state(kind):
    """The two-pass bundle is the core itself."""

    def core(v, da, b, c, initial, learnable):
        flat = (z.flatten(1, 2) for z in (v, da, b, c))
        y, final = ssd_core(*flat, initial + learnable, impl="reference")
        return y.unflatten(1, (N, L)), final

    assert_ways_agree(core, double(kind), [*mamba3_tensors(), *states()])


@pytest.mark.parametrize("kind", KINDS)
def test_single_bundle_is_the_strict_core_and_the_same_step(kind):
    """The one-pass bundle weights by scale, and its own token by gamma instead."""

    def by_hand(v, da, b, c, gamma, scale, initial, learnable):
        flat = [z.flatten(1, 2) for z in (scale[..., None, :, None] * v, da, b, c)]
        y, final = ssd_core(*flat, initial + learnable, impl="reference")
        gram = (c.unsqueeze(4) * b.unsqueeze(3)).sum(-1)
        own = (gram.unsqueeze(-1) * v.unsqueeze(3)).sum(4)
        return y.unflatten(1, (N, L)) + (gamma - scale)[..., None, :, None] * own, final

    weights = [rand(B, N, L, H, seed=9), rand(B, N, L, H, seed=10)]
    assert_ways_agree(by_hand, single(kind), [*mamba3_tensors(), *weights, *states()])


def test_long_names_and_functions_are_the_same_thing():
    """The seeds' method names, the short ones and the two functions agree."""
    tensors, state = mamba3_tensors(), states()[0]
    bundle = Mamba3DoubleSsdInput(*tensors, state)
    want = bundle.serial_recalculated()
    for got in (
        bundle.double_ssd_serial_recalculated(),
        bundle.double_ssd_minimal(),
        bundle.double_ssd_serial(),
        bundle.minimal(),
        bundle.serial(),
        Mamba3SsdPath().run(bundle),
        double_ssd_serial_recalculated(*tensors, state),
    ):
        assert_same(want[0], got[0])
        assert_same(want[1], got[1])
    weights = [rand(B, N, L, H, seed=9), rand(B, N, L, H, seed=10)]
    bundle = Mamba3SingleSsdInput(*tensors, *weights, state)
    want = bundle.single_ssd_minimal()
    got = single_ssd_serial_recalculated(*tensors, *weights, state)
    assert_same(want[0], got[0])


def test_sanity_and_shapes_are_checked():
    """A bundle refuses sizes that disagree, and finds NaN when the guard is on."""
    tensors = mamba2_tensors()
    with pytest.raises(AnyMambaError, match="Mamba2SsdInput: heads is 2"):
        Mamba2SsdInput(*tensors[:2], tensors[2].repeat(2), *tensors[3:])
    tensors[3][0] = torch.nan
    bundle = Mamba2SsdInput(*tensors)
    bundle.sanity()
    with override(deny_nan=True), pytest.raises(AnyMambaError, match="b_bnlhr contains NaN"):
        bundle.sanity()


def test_path_is_a_value():
    """Paths compare, hash, print as their constructor, pickle, and check themselves."""
    assert SsdPath() == SsdPath.serial_recalculated()
    assert SsdPath.serial(7).chunk_len == 7
    assert repr(SsdPath.minimal(32)) == "SsdPath.minimal(32)"
    assert {SsdPath(): 1}[SsdPath()] == 1
    assert pickle.loads(pickle.dumps(SsdPath.serial(3))) == SsdPath.serial(3)
    assert SsdPath.core_optimal(128, 64) == SsdPath.minimal(96)
    assert SsdPath.chunked_optimal(64, 64) == SsdPath.serial(64)
    assert SsdPath.chunked_recalculated_optimal(256, 128) == SsdPath.serial_recalculated(192)
    block = type("Block", (), {"d_state": 512, "headdim": 512})()
    assert SsdPath.core_optimal_from_block(block).chunk_len == 512
    assert SsdPath.chunked_optimal_from_block(block).kind == "serial"
    assert SsdPath.chunked_recalculated_optimal_from_block(block).kind == "serial_recalculated"
    with pytest.raises(ConfigError, match="kind must be one of"):
        SsdPath("fast")
    with pytest.raises(ConfigError, match="chunk_len must be a whole number"):
        SsdPath.serial(0)


def half_bundles():
    """Return the three bundles in bfloat16."""
    weights = [rand(B, N, L, H, seed=9), rand(B, N, L, H, seed=10)]
    half = lambda tensors: [x.bfloat16() for x in tensors]  # noqa: E731
    return [
        (Mamba2SsdInput, half(mamba2_tensors())),
        (Mamba3DoubleSsdInput, half([*mamba3_tensors(), *states()])),
        (Mamba3SingleSsdInput, half([*mamba3_tensors(), *weights, *states()])),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_half_bundles_keep_decays_and_states_in_float32(kind):
    """Products with dt, scale and the initial state are formed in float32."""
    for bundle, tensors in half_bundles():
        y, final = bundle(*tensors).run(SsdPath(kind))
        want_y, want_final = bundle(*(x.float() for x in tensors)).run(SsdPath(kind))
        assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
        assert_same(want_final, final)
        assert_same(want_y.bfloat16(), y)


def test_autocast_does_not_narrow_bundles():
    """Under autocast, float32 bundles give the float32 result."""
    for bundle, tensors in half_bundles():
        wide = bundle(*(x.float() for x in tensors))
        want = wide.serial_recalculated()
        with torch.autocast("cpu", torch.bfloat16):
            got = wide.serial_recalculated()
        assert_same(want[0], got[0])
        assert_same(want[1], got[1])


def test_learnable_state_under_vmap_equals_loop():
    """A mapped learnable initial state gives each slice its own result."""
    tensors, (initial, learnable) = mamba3_tensors(), states()
    several = torch.stack([learnable, 2 * learnable])
    run = lambda state: Mamba3DoubleSsdInput(*tensors, initial, state).serial_recalculated()  # noqa: E731
    y, final = torch.func.vmap(run)(several)
    for place in range(2):
        want = run(several[place])
        assert_same(want[0], y[place])
        assert_same(want[1], final[place])
