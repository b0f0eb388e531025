"""Laws of the hybrid recipe."""

import pytest
import torch

from anymamba.errors import ConfigError
from anymamba.models import MambaConfig, MambaLM, hybrid_config, verify
from anymamba.nn import MHA, Mamba3

SMALL = {"head_dim": 8, "vocab_size": 16, "ssm_cfg": {"headdim": 4, "d_state": 8}}


def test_five_mamba_layers_come_before_each_attention():
    """Groups of six, attention last, without positions; a short last group has none."""
    config = hybrid_config(16, 14, **SMALL)
    assert config.attn_layer_idx == [5, 11]
    lm = MambaLM(config, device="meta")
    kinds = [type(layer.mixer) for layer in lm.backbone.layers]
    assert kinds == ([Mamba3] * 5 + [MHA]) * 2 + [Mamba3] * 2
    attention = lm.backbone.layers[5].mixer
    assert isinstance(attention, MHA)
    assert attention.rotary_emb_dim == 0
    assert MambaConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_the_ratio_can_be_changed():
    """Two to one puts attention in every third place."""
    assert hybrid_config(16, 6, mamba_per_attention=2, **SMALL).attn_layer_idx == [2, 5]


def test_a_hybrid_is_verified_like_any_model():
    """Whole, pieces, steps and packed sequences agree."""
    torch.manual_seed(0)
    assert verify(MambaLM(hybrid_config(16, 6, **SMALL)), length=9).ok


@pytest.mark.parametrize(("sizes", "message"), [((16, 5), "one group"), ((12, 6), "head_dim")])
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, int], message: str):
    """There must be an attention layer, and heads must fill the width."""
    with pytest.raises(ConfigError, match=message):
        hybrid_config(*sizes, **SMALL)
