"""Laws of `anymamba.compat` as a whole: signatures, golden values, precision, compilers."""

import inspect

import pytest
import torch

from anymamba import compat
from anymamba.compat import (
    Mamba2Simple,
    causal_conv1d_fn,
    causal_conv1d_update,
    layer_norm_fn,
    mamba_chunk_scan_combined,
    mamba_inner_fn,
    rms_norm_fn,
    rmsnorm_fn,
    selective_scan_fn,
    selective_scan_ref,
    selective_state_update,
)
from compat_inputs import (
    chunk_scan,
    chunk_scan_by_hand,
    conv_inputs,
    inner_inputs,
    scan_inputs,
    ssd_inputs,
)
from golden import check_golden, golden_case
from laws import assert_same, assert_ways_agree

PRECISE = [torch.float64, torch.float32]

# Names, order and defaults as upstream has them (state-spaces/mamba e9594ce, causal-conv1d 1.6.1).
SIGNATURES = {
    "MambaLMHeadModel": "config, initializer_cfg=None, device=None, dtype=None",
    "selective_scan_fn": "u, delta, A, B, C, D=None, z=None, delta_bias=None, "
    "delta_softplus=False, return_last_state=False",
    "selective_scan_ref": "u, delta, A, B, C, D=None, z=None, delta_bias=None, "
    "delta_softplus=False, return_last_state=False",
    "mamba_inner_fn": "xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, "
    "out_proj_weight, out_proj_bias, A, B=None, C=None, D=None, delta_bias=None, "
    "B_proj_bias=None, C_proj_bias=None, delta_softplus=True, checkpoint_lvl=1, "
    "b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, b_c_dt_rms_eps=1e-06",
    "selective_state_update": "state, x, dt, A, B, C, D=None, z=None, dt_bias=None, "
    "dt_softplus=False, state_batch_indices=None",
    "mamba_chunk_scan_combined": "x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, "
    "initial_states=None, seq_idx=None, cu_seqlens=None, dt_softplus=False, "
    "dt_limit=(0.0, inf), return_final_states=False, return_varlen_states=False, "
    "state_dtype=None",
    "mamba_split_conv1d_scan_combined": "zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, "
    "chunk_size, initial_states=None, seq_idx=None, dt_limit=(0.0, inf), "
    "return_final_states=False, activation='silu', rmsnorm_weight=None, rmsnorm_eps=1e-06, "
    "outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True, "
    "state_dtype=None",
    "ssd_minimal_discrete": "X, A, B, C, block_len, initial_states=None",
    "causal_conv1d_fn": "x, weight, bias=None, seq_idx=None, initial_states=None, "
    "return_final_states=False, final_states_out=None, activation=None",
    "causal_conv1d_update": "x, conv_state, weight, bias=None, activation=None, "
    "cache_seqlens=None, conv_state_indices=None",
    "causal_conv1d_varlen_states": "x, cu_seqlens, state_len",
    "layernorm_fn": "x, weight, bias, z=None, eps=1e-06, group_size=None, "
    "norm_before_gate=True, is_rms_norm=False",
    "rmsnorm_fn": "x, weight, bias, z=None, eps=1e-06, group_size=None, norm_before_gate=True",
    "layer_norm_fn": "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, "
    "eps=1e-06, dropout_p=0.0, rowscale=None, prenorm=False, residual_in_fp32=False, "
    "is_rms_norm=False, return_dropout_mask=False",
    "rms_norm_fn": "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, "
    "eps=1e-06, dropout_p=0.0, rowscale=None, prenorm=False, residual_in_fp32=False, "
    "return_dropout_mask=False",
    "RMSNorm": "hidden_size, eps=1e-05, dropout_p=0.0, device=None, dtype=None",
    "RMSNormGated": "hidden_size, eps=1e-05, group_size=None, norm_before_gate=True, "
    "device=None, dtype=None",
    "Mamba2Simple": "d_model, d_state=64, d_conv=4, conv_init=None, expand=2, headdim=128, "
    "ngroups=1, A_init_range=(1, 16), dt_min=0.001, dt_max=0.1, dt_init_floor=0.0001, "
    "dt_limit=(0.0, inf), learnable_init_states=False, activation='swish', bias=False, "
    "conv_bias=True, chunk_size=256, use_mem_eff_path=True, layer_idx=None, device=None, "
    "dtype=None",
}


@pytest.mark.parametrize("name", compat.__all__)
def test_signature_is_the_official_one(name):
    """Parameter names, their order and their defaults are upstream's."""
    found = []
    for parameter in inspect.signature(getattr(compat, name)).parameters.values():
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        empty = parameter.default is parameter.empty
        found.append(parameter.name if empty else f"{parameter.name}={parameter.default!r}")
    assert ", ".join(found) == SIGNATURES[name]


@pytest.mark.parametrize("dtype", PRECISE)
@pytest.mark.parametrize("scan", [selective_scan_fn, selective_scan_ref])
@pytest.mark.parametrize("name", ["full", "grouped_noz", "plain_L1"])
def test_selective_scan_equals_golden(name, scan, dtype):
    """Outputs, last state and gradients, also those that flow through the last state."""
    case = golden_case("ops/selective_scan", name)
    inputs = case.cast(dtype)
    out, last = scan(**inputs, delta_softplus=name != "grouped_noz", return_last_state=True)
    check_golden(case, inputs, {"out": out, "last_state": last})


@pytest.mark.parametrize("dtype", PRECISE)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("groups_z", {"dt_softplus": True}),
        ("Dhdim_noz_dtlimit", {"dt_softplus": True, "dt_limit": (0.1, 0.7)}),
        ("initial_states", {}),
        ("packed_seq_idx", {"dt_softplus": True}),
    ],
)
def test_chunk_scan_equals_golden(name, options, dtype):
    """Outputs, final or per-sequence states, and gradients."""
    case = golden_case("ops/ssd", name)
    inputs = case.cast(dtype)
    second = "varlen_states" if "cu_seqlens" in inputs else "final_states"
    options = {**options, f"return_{second}": True}
    out, states = mamba_chunk_scan_combined(**inputs, chunk_size=16, **options)
    check_golden(case, inputs, {"out": out, second: states})


@pytest.mark.parametrize("dtype", PRECISE)
@pytest.mark.parametrize("name", ["mamba1", "mamba2"])
def test_state_update_equals_golden(name, dtype):
    """The output is returned and the state is changed in place."""
    case = golden_case("ops/steps", name)
    inputs = {key: value.to(dtype) for key, value in case.inputs.items()}
    y = selective_state_update(**inputs, dt_softplus=True)
    check_golden(case, inputs, {"y": y, "state": inputs["state"]})


@pytest.mark.parametrize("dtype", PRECISE)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("group", [None, 4])
def test_gated_norm_equals_golden(group, before, dtype):
    """Both orders, whole and in groups, with gradients."""
    case = golden_case(
        "ops/norms_activations", f"rmsnorm_gated_before{int(before)}_group{group or 0}"
    )
    inputs = case.cast(dtype)
    options = {"eps": 1e-5, "group_size": group, "norm_before_gate": before}
    check_golden(case, inputs, {"y": rmsnorm_fn(**inputs, bias=None, **options)})


@pytest.mark.parametrize("dtype", PRECISE)
@pytest.mark.parametrize("name", ["add_rmsnorm", "add_layernorm"])
def test_add_norm_equals_golden(name, dtype):
    """The normalised sum, the sum, and gradients through both."""
    case = golden_case("ops/norms_activations", name)
    inputs = case.cast(dtype)
    run = rms_norm_fn if name == "add_rmsnorm" else layer_norm_fn
    y, residual = run(**{"bias": None, **inputs}, eps=1e-5, prenorm=True)
    check_golden(case, inputs, {"y": y, "residual_out": residual})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_compute_in_float32(dtype):
    """Outputs have the dtype of the activations, states float32, and stay beside float64."""
    inputs = [t.to(dtype) for t in scan_inputs(65, "plain")]
    expected = selective_scan_ref(*(t.double() for t in inputs), True, True)
    y, last = selective_scan_fn(*inputs, True, True)
    assert (y.dtype, last.dtype) == (dtype, torch.float32)
    assert_same(expected[0], y)
    assert_same(expected[1], last)
    inputs = [t.to(dtype) for t in ssd_inputs(2, 65)]
    expected = chunk_scan_by_hand(*(t.double() for t in inputs))
    y, final = chunk_scan(*inputs)
    assert (y.dtype, final.dtype) == (dtype, torch.float32)
    assert_same(expected[0], y)


def test_autocast_mixtures_are_accepted():
    """Half coefficients beside float32 inputs widen; autocast does not narrow the scan."""
    u, delta, a, b, c, skip, z, bias = scan_inputs(65, "plain", torch.float32)
    half = [t.bfloat16() for t in (delta, b, c)]
    mixed = selective_scan_fn(u, half[0], a, half[1], half[2], skip, z, bias, True)
    wide = [t.float() for t in half]
    assert mixed.dtype == torch.float32
    assert_same(selective_scan_fn(u, wide[0], a, wide[1], wide[2], skip, z, bias, True), mixed)
    # The wider coefficients are not narrowed to the inputs' dtype: the state shows it.
    expected = selective_scan_fn(u.bfloat16().float(), delta, a, b, c, return_last_state=True)[1]
    y, last = selective_scan_fn(u.bfloat16(), delta, a, b, c, return_last_state=True)
    assert y.dtype == torch.bfloat16
    assert_same(expected, last)
    inputs = {name: t.float() for name, t in inner_inputs().items()}
    expected = mamba_inner_fn(**inputs)
    with torch.autocast("cpu", torch.bfloat16):
        y = mamba_inner_fn(**inputs)
        block = Mamba2Simple(8, d_state=5, headdim=4)
        assert block(torch.ones(1, 3, 8)).dtype == torch.bfloat16
    assert y.dtype == torch.bfloat16
    assert_same(expected, y)


def test_everything_runs_on_meta_tensors():
    """Shapes can be asked without data, in place updates with an index included."""
    with torch.device("meta"):
        scan = [torch.empty(t.shape) for t in scan_inputs(9, "grouped")]
        assert selective_scan_fn(*scan, True).shape == (2, 6, 9)
        packed = [torch.empty(t.shape) for t in ssd_inputs(1, 9)]
        options = {"cu_seqlens": torch.empty(4, dtype=torch.int32), "return_varlen_states": True}
        shapes = [t.shape for t in chunk_scan(*packed, **options)]
        assert shapes == [(1, 9, 4, 3), (1, 4, 3, 5), (3, 4, 3, 5)]
        inner = {name: torch.empty(t.shape) for name, t in inner_inputs().items()}
        assert mamba_inner_fn(**inner).shape == (2, 7, 5)
        assert Mamba2Simple(8, headdim=4)(torch.empty(2, 3, 8)).shape == (2, 3, 8)
        index = torch.empty(2, dtype=torch.int32)
        x, b = torch.empty(2, 6), torch.empty(2, 3)
        y = selective_state_update(
            *(torch.empty(5, 6, 3), x, x, torch.empty(6, 3), b, b), state_batch_indices=index
        )
        assert y.shape == (2, 6)
        pool, weight = torch.empty(5, 6, 4), torch.empty(6, 4)
        y = causal_conv1d_update(x, pool, weight, cache_seqlens=index, conv_state_indices=index)
        assert y.shape == (2, 6)


@pytest.mark.parametrize("what", ["scan", "ssd", "conv", "update"])
def test_compiles_without_graph_breaks(what):
    """One graph gives the numbers of eager mode, gradients included."""
    index = torch.tensor([1, -1], dtype=torch.int32)

    def update(x, dt, a, b, c):
        # A fresh pool: the mutation stays inside the graph.
        pool = a.detach().expand(3, 6, 3).clone()
        y = selective_state_update(
            *(pool, x[..., 0], dt[..., 0], a, b[..., 0], c[..., 0]), state_batch_indices=index
        )
        return [y.detach(), pool]

    cases = {
        "scan": (lambda *t: selective_scan_fn(*t, True, True), scan_inputs(9, "plain")),
        "ssd": (chunk_scan, ssd_inputs(2, 9)),
        "conv": (lambda *t: causal_conv1d_fn(*t[:3], None, t[3], True), conv_inputs(9, 4)),
        "update": (update, scan_inputs(3, "plain")[:5]),
    }
    run, inputs = cases[what]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    if what == "update":
        with torch.no_grad():
            results = zip(run(*inputs), compiled(*inputs), strict=True)
            assert all(torch.equal(want, got) for want, got in results)
    else:
        assert_ways_agree(run, compiled, inputs)
    torch.compiler.reset()


def test_gradcheck():
    """Finite differences agree on tiny shapes, states in and out included."""
    fast = {"fast_mode": True}
    leaves = [t.requires_grad_() for t in scan_inputs(3, "plain")]
    scan = lambda *t: selective_scan_fn(*t, True, True)  # noqa: E731
    assert torch.autograd.gradcheck(scan, leaves, **fast)
    leaves = [t.requires_grad_() for t in ssd_inputs(1, 3)]
    labels = torch.tensor([[0, 1, 1]])
    assert torch.autograd.gradcheck(lambda *t: chunk_scan(*t, seq_idx=labels), leaves, **fast)
    leaves = [t.requires_grad_() for t in conv_inputs(2, 3, batch=1)]
    run = lambda x, w, b, s: causal_conv1d_fn(x, w, b, None, s, True, activation="silu")  # noqa: E731
    assert torch.autograd.gradcheck(run, leaves)
