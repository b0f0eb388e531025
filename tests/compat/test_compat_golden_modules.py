"""Whole official blocks, rebuilt from the compat functions as official code calls them."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from anymamba.compat import (
    Mamba2Simple,
    causal_conv1d_update,
    mamba_inner_fn,
    mamba_split_conv1d_scan_combined,
    rmsnorm_fn,
    selective_state_update,
)
from golden import HERE, relative_error

NAMES = sorted(path.stem for path in (HERE / "modules").glob("mamba[12]_*.safetensors"))
SIMPLE = ["mamba2_dt_limit", "mamba2_g1_rms1_Dhdim0", "mamba2_g2_rms1_Dhdim0"]
STEPPED = ["mamba1_bias_dtrank3_conv2", "mamba1_default", "mamba2_g2_rms1_Dhdim0"]


class Golden:
    """One golden file in float64."""

    def __init__(self, name: str) -> None:
        with safe_open(HERE / "modules" / f"{name}.safetensors", "pt") as file:
            self.options = json.loads(file.metadata()["kwargs"])
            self.tensors = {key: file.get_tensor(key).double() for key in file.keys()}  # noqa: SIM118
        self.parameters = self.under("param/")

    def under(self, prefix: str) -> dict[str, Tensor]:
        found = {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}
        assert found, prefix
        return found

    def close(self, key: str, actual: Tensor) -> None:
        error = relative_error(self.tensors[key], actual.detach())
        # Gradients and states are stored in float32.
        assert error < (1e-9 if key.endswith("/y") or key.endswith("step_y") else 5e-7), (
            key,
            error,
        )


def mamba1(u: Tensor, p: dict[str, Tensor], **_) -> Tensor:
    """Run the body of the official Mamba.forward."""
    xz = F.linear(u, p["in_proj.weight"], p.get("in_proj.bias")).transpose(1, 2)
    return mamba_inner_fn(
        xz,
        p["conv1d.weight"],
        p.get("conv1d.bias"),
        p["x_proj.weight"],
        p["dt_proj.weight"],
        p["out_proj.weight"],
        p.get("out_proj.bias"),
        -p["A_log"].exp(),
        None,
        None,
        p["D"],
        delta_bias=p["dt_proj.bias"],
        delta_softplus=True,
    )


def mamba2(u: Tensor, p: dict[str, Tensor], *, headdim: int, ngroups: int = 1, **options) -> Tensor:
    """Run the body of the official Mamba2.forward."""
    skip = p["D"].unflatten(0, (-1, headdim)) if options.get("D_has_hdim") else p["D"]
    return mamba_split_conv1d_scan_combined(
        F.linear(u, p["in_proj.weight"], p.get("in_proj.bias")),
        p["conv1d.weight"].squeeze(1),
        p.get("conv1d.bias"),
        p["dt_bias"],
        -p["A_log"].exp(),
        D=skip,
        chunk_size=256,
        activation="swish",
        rmsnorm_weight=p.get("norm.weight"),
        rmsnorm_eps=1e-5,
        outproj_weight=p["out_proj.weight"],
        outproj_bias=p.get("out_proj.bias"),
        headdim=None if options.get("D_has_hdim") else headdim,
        ngroups=ngroups,
        norm_before_gate=options.get("norm_before_gate", False),
        dt_limit=options.get("dt_limit", (0.0, float("inf"))),
    )


@pytest.mark.parametrize("name", NAMES)
def test_fused_functions_equal_official_blocks(name):
    """Outputs and the gradients of the input and of every parameter."""
    golden = Golden(name)
    run = mamba1 if name.startswith("mamba1") else mamba2
    parameters = {key: value.requires_grad_() for key, value in golden.parameters.items()}
    for length in (7, 65):
        u = golden.tensors[f"L{length}/u"].requires_grad_()
        y = run(u, parameters, **golden.options)
        golden.close(f"L{length}/y", y)
    grads = torch.autograd.grad((y * golden.tensors["L65/w"]).sum(), [u, *parameters.values()])
    golden.close("L65/grad_u", grads[0])
    for key, grad in zip(parameters, grads[1:], strict=True):
        golden.close(f"L65/grad/{key}", grad)


@pytest.mark.parametrize("name", SIMPLE)
def test_mamba2_simple_equals_the_official_block(name):
    """Where Mamba2 has no more than Mamba2Simple, both are the same block, groups included."""
    golden = Golden(name)
    options = {k: v for k, v in golden.options.items() if k not in ("rmsnorm", "D_has_hdim")}
    block = Mamba2Simple(**options, dtype=torch.float64)
    block.load_state_dict(golden.parameters, strict=True)
    golden.close("L65/y", block(golden.tensors["L65/u"]))


def step1(u: Tensor, p: dict[str, Tensor], conv: Tensor, ssm: Tensor, **_) -> Tensor:
    """Run the body of the official Mamba.step."""
    x, z = F.linear(u, p["in_proj.weight"], p.get("in_proj.bias")).chunk(2, -1)
    x = causal_conv1d_update(x, conv, p["conv1d.weight"][:, 0], p.get("conv1d.bias"), "silu")
    rank, state = p["dt_proj.weight"].shape[1], p["A_log"].shape[1]
    dt, b, c = F.linear(x, p["x_proj.weight"]).split([rank, state, state], -1)
    y = selective_state_update(
        *(ssm, x, F.linear(dt, p["dt_proj.weight"]), -p["A_log"].exp(), b, c, p["D"]),
        z=z,
        dt_bias=p["dt_proj.bias"],
        dt_softplus=True,
    )
    return F.linear(y, p["out_proj.weight"], p.get("out_proj.bias"))


def step2(u: Tensor, p: dict[str, Tensor], conv: Tensor, ssm: Tensor, **options) -> Tensor:
    """Run the body of the official Mamba2.step."""
    heads, width, groups = ssm.shape[1], ssm.shape[2], options["ngroups"]
    inner, channels = heads * width, conv.shape[1]
    z, xbc, dt = F.linear(u, p["in_proj.weight"]).split([inner, channels, heads], -1)
    xbc = causal_conv1d_update(xbc, conv, p["conv1d.weight"][:, 0], p["conv1d.bias"], "swish")
    side = (channels - inner) // 2
    x, b, c = xbc.split([inner, side, side], -1)
    y = selective_state_update(
        ssm,
        x.unflatten(-1, (heads, width)),
        dt[..., None].expand(-1, -1, width),
        -p["A_log"].exp()[:, None, None].expand(ssm.shape[1:]),
        b.unflatten(-1, (groups, -1)),
        c.unflatten(-1, (groups, -1)),
        p["D"][:, None].expand(-1, width),
        dt_bias=p["dt_bias"][:, None].expand(-1, width),
        dt_softplus=True,
    ).flatten(1)
    y = rmsnorm_fn(y, p["norm.weight"], None, z, 1e-5, inner // groups, norm_before_gate=False)
    return F.linear(y, p["out_proj.weight"])


@pytest.mark.parametrize("name", STEPPED)
def test_updates_equal_official_steps(name):
    """From the official states after a prompt: outputs of every step and the states at the end."""
    golden = Golden(name)
    run = step1 if name.startswith("mamba1") else step2
    conv, ssm = (golden.tensors[f"L65/state/{key}"].clone() for key in ("conv", "ssm"))
    outputs = [
        run(u, golden.parameters, conv, ssm, **golden.options)
        for u in golden.tensors["L65/step_u"].unbind(1)
    ]
    error = relative_error(golden.tensors["L65/step_y"], torch.stack(outputs, 1))
    # The states the steps start from may be stored in float32.
    assert error < 5e-7
    golden.close("L65/step_state/conv", conv)
    golden.close("L65/step_state/ssm", ssm)
