"""The configuration: official keys in, official keys out, mistakes refused with a hint."""

import pytest

from anymamba.errors import ConfigError
from anymamba.models import PRESETS, MambaConfig, preset

OFFICIAL_KEYS = [
    "d_model", "d_intermediate", "n_layer", "vocab_size", "ssm_cfg", "attn_layer_idx", "attn_cfg",
    "rms_norm", "residual_in_fp32", "fused_add_norm", "pad_vocab_size_multiple", "tie_embeddings",
]  # fmt: skip


def test_saved_keys_are_the_official_ones():
    """A saved config has the official top-level keys only, in their order."""
    assert list(MambaConfig().to_dict()) == OFFICIAL_KEYS


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_round_trip(name):
    """from_dict(to_dict(config)) describes the same model."""
    config = preset(name)
    again = MambaConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    assert again.padded_vocab_size == config.padded_vocab_size


def test_the_activation_of_a_is_always_written():
    """Official configs cannot tell it, so ours always do; other extras only when they differ."""
    options = {"layer": "Mamba3", "rotation_range": 1.0, "pathway": "double"}
    saved = MambaConfig(ssm_cfg=options).to_dict()["ssm_cfg"]
    assert saved == {"layer": "Mamba3", "pathway": "double", "a_activation": "heavy_tail"}
    assert "a_activation" not in MambaConfig(ssm_cfg={"layer": "Mamba2"}).to_dict()["ssm_cfg"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"d_modle": 8}, "unknown key 'd_modle'. Did you mean 'd_model'"),
        ({"ssm_cfg": {"layer": "Mamba4"}}, "must be one of"),
        ({"ssm_cfg": {"d_stat": 8}}, "Mamba has no option 'd_stat'. Did you mean 'd_state'"),
        ({"attn_cfg": {"num_head": 8}}, "MHA has no option 'num_head'"),
        ({"attn_layer_idx": [99]}, "attn_layer_idx must lie in"),
        ({"n_layer": 0}, "n_layer must be positive"),
        ({"d_intermediate": -1}, "must not be negative"),
    ],
)
def test_mistakes_are_refused_with_a_hint(entries, message):
    """An unknown key or option suggests the nearest name."""
    with pytest.raises(ConfigError) as error:
        MambaConfig.from_dict(entries)
    assert message in str(error.value)


def test_unknown_preset_lists_the_known_ones():
    """A wrong name is answered with all names."""
    with pytest.raises(ConfigError, match="mamba3-mimo-187m"):
        preset("mamba-9000")
