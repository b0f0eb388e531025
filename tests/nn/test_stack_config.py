"""Stack configs: two ways to list layers, JSON and back, mistakes refused with a hint."""

import json
from dataclasses import replace

import pytest
import torch
from stack_cases import ATTENTION, FAMILIES, config, inputs

from anymamba.errors import BackendError, ConfigError
from anymamba.models import MambaConfig, MambaLM
from anymamba.nn import (
    Marker,
    MultiGate,
    RegisterConfig,
    ResidualConfig,
    Stack,
    StackConfig,
    VirtualLayers,
)
from laws import assert_same

EVERYTHING = StackConfig(
    d_model=8,
    layers=["Mamba3", {"layer": "Mamba2", "d_state": 4, "headdim": 4}, "MHA"],
    ssm_cfg={**FAMILIES["mamba3"], "dt_limit": (0.1, 2.0)},
    attn_cfg=ATTENTION,
    d_intermediate=16,
    rms_norm=False,
    norm_eps=1e-6,
    residual_in_fp32=False,
    final_norm=True,
    virtual=VirtualLayers(4, (0, 1, 2, 1)),
    residual=ResidualConfig(multi_gate=MultiGate(n_stream=2, init_bias=-1.0), skip_first=True),
    registers=RegisterConfig(stack=(Marker.start(),), layers={1: (Marker.custom(4),)}),
    grad_horizon=3,
)


@pytest.mark.parametrize("given", [EVERYTHING, config(), config("mamba1", attn_layer_idx=(1,))])
def test_configs_survive_json(given):
    """from_dict(json(to_dict(config))) is the same config and builds the same parameters."""
    again = StackConfig.from_dict(json.loads(json.dumps(given.to_dict())))
    assert again == given
    if not given.attn_layer_idx:
        shapes = [
            {name: tuple(weight.shape) for name, weight in Stack(x).state_dict().items()}
            for x in (given, again)
        ]
        assert shapes[0] == shapes[1]


def test_layers_can_be_listed_or_counted():
    """A family with attention places is the same as the list of its layers."""
    counted = config(real=3, attn_layer_idx=[1], attn_cfg=ATTENTION)
    listed = config(n_layer=None, layers=["Mamba3", "MHA", "Mamba3"], attn_cfg=ATTENTION)
    assert counted.specs == listed.specs
    other = config(n_layer=None, layers=["Mamba1", {"layer": "Mamba3", "d_state": 16}])
    assert other.specs[0].options == {}
    assert other.specs[1].options == {"d_state": 16}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"d_modle": 8}, "unknown key 'd_modle'. Did you mean 'd_model'"),
        ({"n_layer": None}, "give n_layer or layers"),
        ({"layers": ["Mamba1"]}, "give n_layer or layers"),
        ({"n_layer": 0}, "n_layer must lie in 1..65536; got 0"),
        ({"n_layer": None, "layers": []}, "there must be a layer"),
        ({"n_layer": None, "layers": ["Mamba"]}, "got 'Mamba'. Did you mean 'Mamba"),
        ({"n_layer": None, "layers": [{"d_state": 4}]}, "must have a 'layer'"),
        ({"n_layer": None, "layers": ["MHA"], "attn_layer_idx": [0]}, "write 'MHA' in its place"),
        ({"ssm_cfg": {"d_stat": 8}}, "Mamba has no option 'd_stat'. Did you mean 'd_state'"),
        ({"attn_layer_idx": [9]}, "attn_layer_idx must lie in 0..1; got 9"),
        ({"d_model": 0}, "d_model must be positive"),
        ({"d_intermediate": -1}, "must not be negative"),
        ({"virtual": {"count": 1, "schedule": "cyclic"}}, "every layer must be used"),
    ],
)
def test_mistakes_are_refused_with_a_hint(entries, message):
    """An unknown key, kind or option suggests the nearest name."""
    with pytest.raises(ConfigError) as error:
        StackConfig.from_dict({"d_model": 8, "n_layer": 2, **entries})
    assert message in str(error.value)


COMPOSED = MambaConfig(
    d_model=8,
    n_layer=2,
    vocab_size=16,
    ssm_cfg=FAMILIES["mamba3"],
    virtual=VirtualLayers(4, "stretched"),
    residual=ResidualConfig(multi_gate=MultiGate(n_stream=2)),
    grad_horizon=2,
)
COMPOSED_ATTENTION = MambaConfig(
    d_model=8,
    n_layer=3,
    vocab_size=16,
    ssm_cfg=FAMILIES["mamba2"],
    attn_layer_idx=[1],
    attn_cfg=ATTENTION,
    residual=ResidualConfig(skip_last=True),
    grad_horizon=1,
)


def test_a_language_model_is_a_use_of_the_stack():
    """Its backbone is a stack between an embedding and a head; all verbs agree."""
    lm = MambaLM(COMPOSED)
    assert isinstance(lm.backbone, Stack)
    ids_bs = (inputs(2, 6).abs().sum(-1) * 7).long() % 16
    logits_bsw = lm(ids_bs)
    cache = lm.empty_cache(2)
    assert len(cache.layers) == 4
    for place, ids_b in enumerate(ids_bs.unbind(1)):
        logits_bw, cache = lm.step(ids_b, cache)
        assert float((logits_bw - logits_bsw[:, place]).abs().max().detach()) < 1e-5
    lm.loss(ids_bs).backward()
    idle = [n for n, w in lm.named_parameters() if w.requires_grad and w.grad is None]
    assert idle == []
    assert bool((lm.backbone.embedding.weight.grad != 0).any())


def test_a_language_model_has_a_fixed_point():
    """Its logits are the limit of many equal steps; other families say that they have none."""
    torch.manual_seed(0)
    lm = MambaLM(COMPOSED, dtype=torch.float64)
    with torch.no_grad():
        for layer in lm.backbone.layers:
            layer.mixer.dt_bias.fill_(2.0)
        ids_b, cache = torch.tensor([3, 5]), lm.empty_cache(2)
        for _ in range(300):
            logits_bw, cache = lm.step(ids_b, cache)
        torch.testing.assert_close(lm.step_infinite(ids_b), logits_bw, atol=1e-6, rtol=1e-6)
    mamba1 = MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=16))
    with pytest.raises(BackendError, match=r"MambaLM.step_infinite: .* layer 0 is a Mamba"):
        mamba1.step_infinite(ids_b)


def test_a_language_model_config_survives_json():
    """Our keys are written only where they are used, and read back as they were."""
    entries = json.loads(json.dumps(COMPOSED.to_dict()))
    assert {"virtual", "residual", "grad_horizon"} <= entries.keys()
    again = MambaConfig.from_dict(entries)
    assert again.to_dict() == COMPOSED.to_dict()
    for name in ("virtual", "residual", "grad_horizon"):
        assert getattr(again.stack, name) == getattr(COMPOSED, name)
    assert not {"virtual", "residual", "grad_horizon"} & MambaConfig().to_dict().keys()


def test_layers_are_spelled_out_once():
    """Asking again costs nothing, and layers that are given alike are one object."""
    deep = config("mamba2", real=4000, virtual=VirtualLayers(8000), attn_layer_idx=[5])
    assert deep.specs is deep.specs
    assert deep.schedule is deep.schedule
    assert deep.gate_names is deep.gate_names
    assert len({id(spec) for spec in deep.specs}) == 2
    assert replace(deep, n_layer=3000).schedule != deep.schedule
    with pytest.raises(ConfigError, match=r"n_layer must lie in 1..65536; got 1000000000"):
        config(real=10**9)


@pytest.mark.parametrize("given", [COMPOSED, COMPOSED_ATTENTION], ids=["gates", "attention"])
def test_a_composed_language_model_survives_its_files(given, tmp_path):
    """Config, weights and frozen parameters come back as they were."""
    torch.manual_seed(0)
    lm = MambaLM(given)
    lm.save_pretrained(tmp_path)
    again = MambaLM.from_pretrained(tmp_path)
    assert again.config.to_dict() == lm.config.to_dict()
    frozen = [{n for n, w in x.named_parameters() if not w.requires_grad} for x in (lm, again)]
    assert frozen[0] == frozen[1]
    ids_bs = torch.tensor([[1, 2, 3]])
    assert torch.equal(lm(ids_bs), again(ids_bs))


def test_a_language_model_says_why_it_has_no_registers():
    """Registers have no token to predict; the message names what does the same."""
    with pytest.raises(ConfigError, match=r"registers.*a token of the vocabulary"):
        MambaConfig.from_dict({**COMPOSED.to_dict(), "registers": {"stack": [{"kind": "start"}]}})


def test_a_spare_token_is_a_register():
    """What a start register says, a token of the vocabulary in its place says too."""
    torch.manual_seed(0)
    lm = MambaLM(replace(COMPOSED, grad_horizon=None), dtype=torch.float64)
    marked = replace(lm.config.stack, registers=RegisterConfig(stack=[Marker.start()]))
    stack = Stack(marked, dtype=torch.float64)
    weights = {n: w for n, w in lm.backbone.state_dict().items() if not n.startswith("embedding")}
    table_rd = lm.backbone.embedding.weight[15:]
    stack.load_state_dict({**weights, "registers.table": table_rd})
    ids_bs = torch.tensor([[3, 1, 4]])
    with_token = lm.backbone(lm.backbone.embedding(torch.tensor([[15, 3, 1, 4]])))
    assert_same(with_token.detach(), stack(lm.backbone.embedding(ids_bs)).detach())
