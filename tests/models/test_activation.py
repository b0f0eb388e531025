"""The activation of A can be read from trained weights and a text, and only from those."""

import math

import pytest
import torch

from anymamba.errors import ConfigError, ShapeError
from anymamba.models import MambaConfig, MambaLM, compare_activations
from trained import TEXT, fresh, trained

ACTIVATIONS = ("heavy_tail", "softplus")
IDS = torch.tensor([list(TEXT.encode())[:400]])


@pytest.mark.parametrize("loaded_as", ACTIVATIONS)
@pytest.mark.parametrize("truth", ACTIVATIONS)
def test_trained_weights_tell(truth, loaded_as):
    """Whatever the model was loaded as, its perplexity names what it was trained with."""
    lm = trained(truth)
    mixers = [layer.mixer for layer in lm.backbone.layers]
    for mixer in mixers:
        mixer.a_activation = loaded_as
    report = compare_activations(lm, IDS)
    assert [mixer.a_activation for mixer in mixers] == [loaded_as]
    for mixer in mixers:
        mixer.a_activation = truth
    assert (report.best, report.is_decisive, report.configured) == (truth, True, loaded_as)
    assert report.perplexity[truth] == min(report.perplexity.values()) < 1.3
    own = math.exp(float(lm.loss(IDS).detach()))
    assert report.perplexity[truth] == pytest.approx(own, rel=1e-5)


def test_fresh_weights_do_not_tell():
    """Random weights hardly notice the activation, so nothing is claimed."""
    assert not compare_activations(fresh("softplus"), IDS).is_decisive


def test_other_families_have_no_choice():
    """Mamba-1 and Mamba-2 are refused with the reason."""
    lm = MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=256))
    with pytest.raises(ConfigError, match="must have Mamba-3 layers; got Mamba1"):
        compare_activations(lm, IDS)


def test_one_token_predicts_nothing():
    """A text must have two tokens."""
    with pytest.raises(ShapeError, match="longer text"):
        compare_activations(fresh("softplus"), IDS[:, :1])
