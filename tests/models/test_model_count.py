"""Counts of whole models against published numbers, and against the models themselves."""

import pytest
import torch

from anymamba.errors import ConfigError
from anymamba.models import (
    PRESETS,
    Encoder,
    EncoderConfig,
    LatentConfig,
    LatentModel,
    MambaConfig,
    MambaLM,
    count_model,
    preset,
)
from anymamba.nn import (
    BidirectionalConfig,
    Mamba3,
    Marker,
    MultiGate,
    RegisterConfig,
    ResidualConfig,
    StackConfig,
    VirtualLayers,
    flops_per_token,
)

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


MAMBA3 = {"layer": "Mamba3", "d_state": 8, "headdim": 8}
STACK = {
    "d_model": 16,
    "ssm_cfg": MAMBA3,
    "d_intermediate": 8,
    "final_norm": True,
    "residual": ResidualConfig(multi_gate=MultiGate(n_stream=2, per_virtual=False)),
}
CAUSAL = StackConfig(
    n_layer=2,
    virtual=VirtualLayers(5, "stretched"),
    registers=RegisterConfig(stack=[Marker.start()], layers={1: [Marker.end(), Marker.middle()]}),
    **STACK,
)
PAIRED = BidirectionalConfig(
    n_layer=4,
    virtual=VirtualLayers(10, "strided_cyclic"),
    merge="cat_linear",
    registers=RegisterConfig(stack=[Marker.start()]),
    **STACK,
)
COMPOSED = {
    "latent": lambda: LatentModel(LatentConfig(d_input=3, d_output=2, stack=CAUSAL)),
    "paired": lambda: LatentModel(LatentConfig(d_input=3, d_output=2, stack=PAIRED)),
    "embedding": lambda: Encoder(EncoderConfig(vocab_size=32, stack=PAIRED)),
    "classes": lambda: Encoder(EncoderConfig(vocab_size=32, stack=PAIRED, n_classes=3)),
    "masked": lambda: Encoder(EncoderConfig(vocab_size=32, stack=PAIRED, head="masked")),
    "lm": lambda: MambaLM(
        MambaConfig(
            d_model=16,
            n_layer=2,
            vocab_size=32,
            ssm_cfg=MAMBA3,
            virtual=VirtualLayers(5),
            residual=ResidualConfig(multi_gate=MultiGate(n_stream=2)),
        )
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_parts_of_composed_models_make_up_the_whole(name):
    """Gates, registers, merges and heads are counted; each part is there once, by its own name."""
    model = COMPOSED[name]()
    count = count_model(model, length=10)
    assert count.parameters == sum(x.numel() for x in model.parameters())
    assert len({part.name for part in count.parts}) == len(count.parts)
    for part in count.parts:
        assert model.get_submodule(part.name.partition(" ")[0]) is not None
    # One int64 for the position; a bidirectional model has no state.
    state = model.empty_cache(1).nbytes - 8 if name in ("latent", "lm") else 0
    assert count.state_bytes == state


def test_virtual_layers_cost_a_pass_each():
    """Weights count once, passes by the schedule: the FLOP of five layers."""
    kinds = count_model(COMPOSED["latent"](), length=10).by_kind()
    mixer = flops_per_token(Mamba3(16, d_state=8, headdim=8))
    assert kinds["Mamba3"][0] == 2
    assert kinds["Mamba3"][1].passes == 5
    assert kinds["Mamba3"][1].flops == 5 * mixer
    assert kinds["gates"][1].passes == 5
    assert kinds["norm"][1].passes == 5 + 5 + 1
    assert kinds["head"][1].flops == 2 * 16 * 2
    kinds = count_model(COMPOSED["classes"](), length=10).by_kind()
    assert kinds["Mamba3"][1].passes == 10
    assert kinds["Mamba3"][1].flops == 10 * mixer
    assert kinds["merge"][1].flops == 5 * 2 * 32 * 16
    assert kinds["GatedMLP"][1].passes == 5
    # Read once, by a sequence of ten: 2 * 16 * 3 / 10, rounded up.
    assert kinds["head"][1].flops == 10
    assert count_model(COMPOSED["masked"]()).by_kind()["head"][1].flops == 2 * 16 * 32


def test_what_is_no_model_is_refused():
    """A block is counted by other functions, which are named."""
    with pytest.raises(ConfigError, match=r"got Mamba3\. For one block use"):
        count_model(Mamba3(16, d_state=8, headdim=8))


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
