"""The Mamba-2 scan around the SSD core: official numbers, steps, and one rounding."""

import pytest
import torch

from anymamba.ops import SsdPath, softplus, ssd, ssd_step
from golden import check_golden, golden_case
from kernels import is_native
from laws import assert_ways_agree, rand, randn


def mamba2_inputs(case, dtype):
    inputs = case.cast(dtype)
    dt = inputs["dt"]
    if "dt_bias" in inputs:
        dt = softplus(dt + inputs["dt_bias"])
    return inputs, dt


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "name", ["groups_z", "Dhdim_noz_dtlimit", "initial_states", "packed_seq_idx"]
)
def test_mamba2_scan_equals_official(name, kind, dtype):
    """The Mamba-2 scan reproduces the official kernel's values, states and gradients."""
    if is_native(kind) and dtype == torch.float64:
        pytest.skip("the kernels compute in float32")
    case = golden_case("ops/ssd", name)
    inputs, dt = mamba2_inputs(case, dtype)
    how = {"impl": "native"} if is_native(kind) else {"path": SsdPath(kind, 16)}
    if name == "Dhdim_noz_dtlimit":
        dt = dt.clamp(0.1, 0.7)
    out, final = ssd(
        inputs["x"], dt, inputs["A"], inputs["B"], inputs["C"], inputs.get("D"),
        inputs.get("initial_states"), **how, cu_seqlens=inputs.get("cu_seqlens"),
    )  # fmt: skip
    if "z" in inputs:
        out = out * torch.nn.functional.silu(inputs["z"])
    state = "varlen_states" if name == "packed_seq_idx" else "final_states"
    check_golden(case, inputs, {"out": out, state: final})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_step_unrolled_equals_scan(dtype):
    """One token at a time equals the whole scan, gradients included."""
    inputs = [
        randn(2, 9, 4, 3, seed=1, dtype=dtype), rand(2, 9, 4, seed=2, dtype=dtype),
        -rand(4, seed=3, dtype=dtype), randn(2, 9, 2, 5, seed=4, dtype=dtype),
        randn(2, 9, 2, 5, seed=5, dtype=dtype), randn(4, seed=6, dtype=dtype),
        randn(2, 4, 3, 5, seed=7, dtype=dtype),
    ]  # fmt: skip

    def steps(x, dt, a, b, c, skip, state):
        ys = []
        for t in range(x.shape[1]):
            y, state = ssd_step(x[:, t], dt[:, t], a, b[:, t], c[:, t], skip, state)
            ys.append(y)
        return torch.stack(ys, 1), state

    assert_ways_agree(ssd, steps, inputs)


@pytest.mark.parametrize("skip", [None, 4], ids=["plain", "skip"])
def test_half_types_of_the_mamba2_scan_are_rounded_once(kind, skip):
    """With a skip too, the output is the float32 result, rounded at the very end."""
    x, b, c = (randn(2, 40, n, 5, seed=seed).bfloat16() for seed, n in ((1, 4), (4, 2), (5, 2)))
    dt, a = rand(2, 40, 4, seed=2, dtype=torch.float32), -rand(4, seed=3, dtype=torch.float32)
    skip = skip and randn(skip, seed=6, dtype=torch.float32)
    how = {"impl": "native"} if is_native(kind) else {"path": SsdPath(kind, 16)}
    want = ssd(x.float(), dt, a, b.float(), c.float(), skip, **how).y_bshp
    got = ssd(x, dt, a, b, c, skip, **how).y_bshp
    assert torch.equal(want.bfloat16(), got)
