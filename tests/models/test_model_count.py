"""Counts of whole models against published numbers, and against the models themselves."""

import pytest
import torch

from anymamba.errors import ConfigError
from anymamba.models import PRESETS, MambaConfig, MambaLM, count_model, preset
from anymamba.nn import flops_per_token

PUBLISHED = {
    "mamba-130m": 129_135_360,
    "mamba2-130m": 128_989_632,
    "mamba3-siso-187m": 186_849_600,
    "mamba3-mimo-187m": 187_291_968,
}
HYBRID = {
    "d_model": 16,
    "n_layer": 3,
    "vocab_size": 30,
    "d_intermediate": 128,
    "ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 8},
    "attn_layer_idx": [1],
    "attn_cfg": {"num_heads": 4, "num_heads_kv": 2, "head_dim": 4, "causal": True, "d_conv": 3},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    """The four public checkpoints have the published number of parameters, a tied head once."""
    assert count_model(MambaLM(preset(name), device="meta")).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_parts_make_up_the_whole(name):
    """Parameters and bytes of the parts are those of the module, state bytes those of a cache."""
    lm = MambaLM(preset(name), device="meta", dtype=torch.bfloat16)
    count = count_model(lm)
    assert count.parameters == sum(x.numel() for x in lm.parameters())
    assert count.bytes == sum(x.numel() * x.element_size() for x in lm.parameters())
    assert len({part.name for part in count.parts}) == len(count.parts)
    if not lm.config.attn_layer_idx:
        # The model's cache also knows its position: one int64.
        assert count.state_bytes == lm.empty_cache(1, device="meta").nbytes - 8


def test_flops_of_a_layer_are_those_of_its_matrices():
    """A model without attention: mixers as counted by themselves, two FLOP per weight elsewhere."""
    lm = MambaLM(preset("mamba3-siso-187m"), device="meta")
    count = count_model(lm)
    kinds = count.by_kind()
    layers = lm.backbone.layers
    assert kinds["Mamba3"] == (12, kinds["Mamba3"][1])
    assert kinds["Mamba3"][1].flops == sum(flops_per_token(layer.mixer) for layer in layers)
    assert kinds["GatedMLP"][1].flops == 2 * kinds["GatedMLP"][1].parameters
    assert kinds["head"][1].flops == 2 * 768 * 128256
    assert kinds["head"][1].parameters == 0
    assert count.flops == sum(part.flops for _, part in kinds.values())
    assert count.to_dict()["parameters"] == count.parameters
    assert len(count.to_dict()["parts"]) == len(count.parts)


def test_attention_grows_with_the_sequence():
    """Keys and values are counted for `length` tokens, scores for the mean of the places."""
    lm = MambaLM(MambaConfig(**HYBRID))
    length = 10
    count, longer = (count_model(lm, length=n) for n in (length, 2 * length))
    mha = next(part for part in count.parts if part.kind == "MHA")
    _, cache = lm.prefill(torch.zeros(1, length, dtype=torch.int64))
    assert mha.state_bytes == cache.layers[1].nbytes
    attention = lm.backbone.layers[1].mixer
    weights = attention.in_proj.weight.numel() + attention.out_proj.weight.numel()
    scores = sum(4 * 4 * 4 * seen for seen in range(1, length + 1)) // length
    assert mha.flops == 2 * weights + 2 * 3 * attention.qkv_dim + scores
    assert longer.state_bytes - count.state_bytes == 2 * 2 * 4 * length * 4
    assert longer.flops > count.flops


def test_rejects_an_empty_sequence():
    """A length must be positive."""
    with pytest.raises(ConfigError, match="length must be positive; got 0"):
        count_model(MambaLM(MambaConfig(**HYBRID), device="meta"), length=0)
