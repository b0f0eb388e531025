"""The trapezoidal scan and step, composed into the official Mamba-3 kernels."""

import pytest
import torch
from trapezoid_cases import PATHWAYS

from anymamba.ops import (
    TrapezoidCoefficients,
    TrapezoidState,
    angle_increment,
    cumulate_angles,
    gated_rms_norm,
    rotate_pairs,
    trapezoid_scan,
    trapezoid_step,
)
from golden import check_golden, golden_case
from kernels import PRECISIONS


def official_scan(inputs, *, rank, cu_seqlens=None, **options):
    """Compose our operators into the semantics of the official fused Mamba-3 kernels."""
    mimo = rank is not None
    v, heads = inputs["V"], inputs["V"].shape[2]
    q, k = (inputs[name] if mimo else inputs[name].unsqueeze(2) for name in ("Q", "K"))
    q_bias, k_bias = (
        inputs[f"{name}_bias"].transpose(0, 1) if mimo else inputs[f"{name}_bias"].unsqueeze(0)
        for name in ("Q", "K")
    )
    dt, da, trap = (inputs[name].transpose(1, 2) for name in ("DT", "ADT", "Trap"))
    rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    groups, angles = q.shape[3], inputs["Angles"].shape[-1]
    start = inputs.get("angle0", v.new_zeros(rows, heads, angles))
    increment = angle_increment(inputs["Angles"], dt.unsqueeze(-1))
    angle, last_angle = cumulate_angles(increment, start, cu_seqlens=cu_seqlens)
    pairing = "half_split" if mimo else "interleaved"

    def prepare(x, bias):
        x = x.repeat_interleave(heads // groups, 3) + bias
        return rotate_pairs(x, angle.unsqueeze(2), pairing)

    values = v.unsqueeze(2)
    if mimo:
        values = values * inputs["MIMO_V"].transpose(0, 1)
    state = None
    if "ssm0" in inputs:
        state = TrapezoidState(inputs["ssm0"], inputs["k0"].unsqueeze(1), inputs["v0"].unsqueeze(1))
    y, last = trapezoid_scan(
        values, prepare(k, k_bias), prepare(q, q_bias),
        TrapezoidCoefficients(dt, da, trap.sigmoid()), state, cu_seqlens=cu_seqlens, **options,
    )  # fmt: skip
    if "D" in inputs:
        y = y + inputs["D"][:, None] * values
    if "Z" in inputs:
        gate = inputs["Z"].unsqueeze(2)
        if mimo:
            gate = gate * inputs["MIMO_Z"].transpose(0, 1)
        if "norm_weight" in inputs:
            width = v.shape[-1]
            flat = (x.flatten(-2) for x in (y, gate.expand_as(y)))
            normed = gated_rms_norm(
                *flat, inputs["norm_weight"], group_size=width, norm_before_gate=True
            )
            y = normed.view(y.shape)
        else:
            y = y * torch.nn.functional.silu(gate)
    if "MIMO_Out" in inputs:
        y = (y * inputs["MIMO_Out"].transpose(0, 1)).sum(2)
    elif not mimo:
        y = y.squeeze(2)
    ends = v[:, -1] if cu_seqlens is None else v[0, cu_seqlens[1:].long() - 1]
    last_k = last.k_bmgr if mimo else last.k_bmgr.squeeze(1)
    return {"out": y, "angle": last_angle, "ssm": last.ssm_bhpr, "k": last_k, "v": ends}


@PRECISIONS
@pytest.mark.parametrize("pathway", PATHWAYS)
@pytest.mark.parametrize("name", ["states", "nostate_rope1_gqa", "bare", "L1_state", "varlen"])
def test_siso_scan_equals_official(name, pathway, dtype):
    """The composed SISO scan reproduces the official kernel: values, four states, gradients."""
    case = golden_case("ops/mamba3_siso", name)
    inputs = case.cast(dtype)
    outputs = official_scan(inputs, rank=None, pathway=pathway, cu_seqlens=inputs.get("cu_seqlens"))
    check_golden(case, inputs, outputs, angles=("angle",))


@PRECISIONS
@pytest.mark.parametrize("pathway", PATHWAYS)
@pytest.mark.parametrize("name", ["reduce_z", "noreduce_noz", "fused_norm_gqa_rope1", "varlen"])
def test_mimo_scan_equals_official(name, pathway, dtype):
    """The composed MIMO scan reproduces the official kernel: values, four states, gradients."""
    case = golden_case("ops/mamba3_mimo", name)
    inputs = case.cast(dtype)
    rank = inputs["Q"].shape[2]
    outputs = official_scan(inputs, rank=rank, pathway=pathway, cu_seqlens=inputs.get("cu_seqlens"))
    check_golden(case, inputs, outputs, angles=("angle",))


@PRECISIONS
@pytest.mark.parametrize(("name", "pairing"), [("siso", "interleaved"), ("mimo", "half_split")])
def test_step_equals_official(name, pairing, dtype):
    """The composed one-token update reproduces the official decode kernels."""
    case = golden_case("ops/steps", f"mamba3_{name}")
    i = case.cast(dtype)
    angle = i["angle0"] + angle_increment(i["angle_proj"], i["dt"].unsqueeze(-1))
    b, c = (rotate_pairs(i[x] + i[f"{x}_bias"], angle.unsqueeze(1), pairing) for x in "BC")
    v, before = (x.unsqueeze(1) * i["xproj"] for x in (i["x"], i["v0"]))
    coefficients = TrapezoidCoefficients(i["dt"], i["dt"] * i["A"], i["trap"])
    y, state = trapezoid_step(v, b, c, coefficients, TrapezoidState(i["ssm0"], i["k0"], before))
    y = (y + i["D"][:, None] * v) * torch.nn.functional.silu(i["z"].unsqueeze(1) * i["zproj"])
    y = (y * i["outproj"]).sum(1)
    outputs = {"y": y, "ssm": state.ssm_bhpr, "k": state.k_bmgr, "angle": angle}
    check_golden(case, i, outputs, angles=("angle",))
