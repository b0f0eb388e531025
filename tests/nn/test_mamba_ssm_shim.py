"""Drop-in for `mamba_ssm`: parameter names, shapes, order and values; its generation protocol."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from anymamba.errors import CacheError, ConfigError, PackingError, ShapeError
from anymamba.nn import Mamba, Mamba1, Mamba2, Mamba3
from block_cases import CASES, WIDTH, build, tokens
from laws import assert_same


@dataclass
class InferenceParams:
    """What `mamba_ssm`'s generation loop hands to every layer."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[int, Any] = field(default_factory=dict)


# d_model 8, expand 2, so d_inner 16. Keys stand in the order in which upstream registers them.
OFFICIAL = [
    (
        lambda **extra: Mamba(WIDTH, d_state=4, d_conv=3, dt_rank=5, bias=True, **extra),
        {
            "A_log": (16, 4),
            "D": (16,),
            "in_proj.weight": (32, 8),
            "in_proj.bias": (32,),
            "conv1d.weight": (16, 1, 3),
            "conv1d.bias": (16,),
            "x_proj.weight": (13, 16),
            "dt_proj.weight": (16, 5),
            "dt_proj.bias": (16,),
            "out_proj.weight": (8, 16),
            "out_proj.bias": (8,),
        },
    ),
    (
        lambda **extra: Mamba2(WIDTH, d_state=4, headdim=4, ngroups=2, conv_bias=False, **extra),
        {
            "dt_bias": (4,),
            "A_log": (4,),
            "D": (4,),
            "in_proj.weight": (52, 8),
            "conv1d.weight": (32, 1, 4),
            "norm.weight": (16,),
            "out_proj.weight": (8, 16),
        },
    ),
    (
        lambda **extra: Mamba2(
            WIDTH, d_state=4, headdim=4, d_ssm=8, D_has_hdim=True, rmsnorm=False, **extra
        ),
        {
            "dt_bias": (2,),
            "A_log": (2,),
            "D": (8,),
            "in_proj.weight": (42, 8),
            "conv1d.weight": (16, 1, 4),
            "conv1d.bias": (16,),
            "out_proj.weight": (8, 16),
        },
    ),
    (
        lambda **extra: Mamba3(WIDTH, d_state=8, headdim=4, ngroups=2, **extra),
        {
            "dt_bias": (4,),
            "B_bias": (4, 1, 8),
            "C_bias": (4, 1, 8),
            "D": (4,),
            "in_proj.weight": (78, 8),
            "B_norm.weight": (8,),
            "C_norm.weight": (8,),
            "out_proj.weight": (8, 16),
        },
    ),
    (
        lambda **extra: Mamba3(
            WIDTH,
            d_state=8,
            headdim=4,
            rope_fraction=1.0,
            is_mimo=True,
            mimo_rank=2,
            is_outproj_norm=True,
            **extra,
        ),
        {
            "dt_bias": (4,),
            "B_bias": (4, 2, 8),
            "C_bias": (4, 2, 8),
            "mimo_x": (4, 2, 4),
            "mimo_z": (4, 2, 4),
            "mimo_o": (4, 2, 4),
            "D": (4,),
            "in_proj.weight": (80, 8),
            "B_norm.weight": (8,),
            "C_norm.weight": (8,),
            "norm.weight": (16,),
            "out_proj.weight": (8, 16),
        },
    ),
]


@pytest.mark.parametrize(("make", "entries"), OFFICIAL)
def test_state_dict_has_official_names_shapes_and_order(make, entries):
    """An official state dict loads with strict=True, and optimiser states line up by position."""
    state = make().state_dict()
    assert list(state) == list(entries)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == entries


@pytest.mark.parametrize(("make", "entries"), OFFICIAL)
def test_initial_values_are_the_official_ones(make, entries):
    """Skips and norms are 1, biases of B and C are 1, ranks share the value, steps lie in range."""
    block = make(dt_min=0.002, dt_max=0.05)
    bias = block.dt_proj.bias if isinstance(block, Mamba) else block.dt_bias
    dt = F.softplus(bias.detach())
    assert dt.min() >= 0.002 * 0.999
    assert dt.max() <= 0.05 * 1.001
    assert dt.unique().numel() > 1
    for name, value in block.state_dict().items():
        if name in ("D", "B_bias", "C_bias", "mimo_z") or "norm" in name:
            assert bool((value == 1).all()), name
        if name in ("mimo_x", "mimo_o"):
            assert bool((value == 1 / block.mimo_rank).all()), name


def test_initial_decays_are_the_official_ones():
    """Mamba-1 counts 1..d_state in every channel; Mamba-2 draws |A| from A_init_range."""
    rates_ir = Mamba(WIDTH, d_state=4).A_log.exp()
    assert_same(torch.arange(1.0, 5).expand(16, 4), rates_ir.detach())
    rates_h = Mamba2(64, headdim=2, A_init_range=(3, 5)).A_log.detach().exp()
    assert rates_h.min() >= 3 * 0.999
    assert rates_h.max() <= 5 * 1.001
    assert rates_h.unique().numel() > 32


def test_initial_step_projection_follows_its_options():
    """dt_proj.weight is constant or uniform with bound dt_rank^-0.5 * dt_scale."""
    constant = Mamba(WIDTH, dt_rank=4, dt_init="constant", dt_scale=3.0).dt_proj.weight
    assert bool((constant == 1.5).all())
    random = Mamba(64, dt_rank=4, dt_scale=3.0).dt_proj.weight.abs()
    assert 1.2 < random.max() <= 1.5
    assert Mamba(WIDTH).dt_proj.bias._no_reinit is True


def test_initial_steps_respect_their_floor():
    """dt_init_floor is applied after the draw."""
    dt = F.softplus(Mamba3(64, headdim=2, dt_min=1e-5, dt_max=1e-2, dt_init_floor=1e-3).dt_bias)
    assert dt.min() >= 1e-3 * 0.999


def test_convolution_initialisation_follows_its_option():
    """conv_init is the bound of a uniform draw."""
    weight = Mamba2(64, headdim=8, conv_init=0.01).conv1d.weight.abs()
    assert 0.009 < weight.max() <= 0.01


@pytest.mark.parametrize("case", CASES)
def test_official_arguments_are_accepted(case):
    """Arguments that only steer CUDA kernels upstream may stay in the call."""
    extra: dict[str, Any] = {
        "mamba1": {"use_fast_path": False},
        "mamba2": {"use_mem_eff_path": False, "process_group": None, "sequence_parallel": False},
        "mamba3": {"fuse_pregate_headwise_norm": False, "dropout": 0.1, "n_layer": 4},
    }[case.partition("_")[0]]
    u_bsd = tokens(1, 3).detach()
    with torch.no_grad():
        assert torch.equal(build(case)(u_bsd), build(case, **extra)(u_bsd))


def test_mamba1_is_mamba():
    """Both official names lead to one class."""
    assert Mamba1 is Mamba


@pytest.mark.parametrize("case", CASES)
def test_generation_protocol_equals_forward(case):
    """A prompt at offset 0, then one token per call: the outputs of the whole sequence."""
    block, u_bsd = build(case, layer_idx=3), tokens(2, 8).detach()
    params = InferenceParams(max_seqlen=8, max_batch_size=2)
    with torch.no_grad():
        expected = block(u_bsd)
        outputs = [block(u_bsd[:, :5], inference_params=params)]
        assert list(params.key_value_memory_dict) == [3]
        for place in range(5, 8):
            params.seqlen_offset = place
            outputs.append(block(u_bsd[:, place : place + 1], inference_params=params))
            assert outputs[-1].shape == (2, 1, WIDTH)
    assert_same(expected, torch.cat(outputs, 1))


@pytest.mark.parametrize("case", CASES)
def test_generation_protocol_starts_from_nothing(case):
    """A second prompt at offset 0 forgets the first, like upstream."""
    block, u_bsd = build(case, layer_idx=0), tokens(2, 4).detach()
    params = InferenceParams(max_seqlen=4, max_batch_size=2)
    with torch.no_grad():
        block(tokens(2, 5, seed=9).detach(), inference_params=params)
        assert torch.equal(block(u_bsd), block(u_bsd, inference_params=params))


@pytest.mark.parametrize("case", CASES)
def test_preallocated_cache_serves_generation(case):
    """allocate_inference_cache(batch, max_seqlen, dtype) is the state before the first token."""
    block, u_bsd = build(case, layer_idx=0), tokens(2, 3).detach()
    cache = block.allocate_inference_cache(2, 128, dtype=torch.float32, fused_decode=True)
    assert type(cache) is type(block.empty_cache(2))
    with torch.no_grad():
        expected = block(u_bsd)
        for place in range(3):
            params = InferenceParams(
                8, 2, seqlen_offset=place + 1, key_value_memory_dict={0: cache}
            )
            y_b1d = block(u_bsd[:, place : place + 1], inference_params=params)
            cache = params.key_value_memory_dict[0]
            assert_same(expected[:, place : place + 1], y_b1d)


@pytest.mark.parametrize("case", CASES)
def test_rejects_generation_without_a_place(case):
    """Without layer_idx there is no key in the dictionary: the message names the argument."""
    params = InferenceParams(max_seqlen=4, max_batch_size=1)
    with pytest.raises(ConfigError, match="layer_idx"):
        build(case)(tokens(1, 3), inference_params=params)


@pytest.mark.parametrize("case", CASES)
def test_rejects_several_tokens_after_the_prompt(case):
    """Offset > 0 decodes one token per call; more is a mistake with a way out in the message."""
    params = InferenceParams(max_seqlen=4, max_batch_size=1)
    block = build(case, layer_idx=0)
    block(tokens(1, 3), inference_params=params)
    params.seqlen_offset = 3
    with pytest.raises(ShapeError, match=r"one token at a time; got 2.*prefill"):
        block(tokens(1, 2), inference_params=params)


def test_rejects_decoding_before_the_prompt():
    """Offset > 0 without a cache names what is missing instead of a bare KeyError."""
    params = InferenceParams(max_seqlen=4, max_batch_size=1, seqlen_offset=2)
    with pytest.raises(CacheError, match=r"layer_idx 5.*offset 0"):
        build("mamba2", layer_idx=5)(tokens(1, 1), inference_params=params)


@pytest.mark.parametrize("case", CASES)
def test_generation_protocol_takes_packed_prompts(case):
    """Prompts of different lengths in one row; each sequence then decodes in its own row."""
    block, u_1sd = build(case, layer_idx=0), tokens(1, 9).detach()
    next_q1d = tokens(2, 1, seed=5).detach()
    params, borders = InferenceParams(max_seqlen=9, max_batch_size=2), torch.tensor([0, 4, 9])
    with torch.no_grad():
        y_1sd = block(u_1sd, inference_params=params, cu_seqlens=borders)
        params.seqlen_offset = 5
        y_q1d = block(next_q1d, inference_params=params)
        with pytest.raises(PackingError, match="cannot be packed"):
            block(next_q1d[:1], inference_params=params, cu_seqlens=borders)
        for row, piece in enumerate((u_1sd[:, :4], u_1sd[:, 4:])):
            whole = block(torch.cat([piece, next_q1d[row : row + 1]], 1))
            assert_same(whole[:, -1], y_q1d[row : row + 1, -1])
            assert_same(whole[:, :-1], y_1sd[:, borders[row] : borders[row + 1]])
