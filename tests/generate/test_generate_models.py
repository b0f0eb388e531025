"""Generation is for language models; other models say what they offer instead."""

import pytest
import torch

from anymamba.errors import ConfigError
from anymamba.generate import generate, generate_detailed, stream
from anymamba.models import (
    Encoder,
    EncoderConfig,
    LatentConfig,
    LatentModel,
    MambaConfig,
    MambaLM,
)
from anymamba.nn import BidirectionalConfig, StackConfig

OTHERS = {
    "LatentModel": lambda: LatentModel(
        LatentConfig(d_input=2, d_output=2, stack=StackConfig(d_model=8, n_layer=1))
    ),
    "Encoder": lambda: Encoder(
        EncoderConfig(vocab_size=16, stack=BidirectionalConfig(d_model=8, n_layer=2))
    ),
    "Linear": lambda: torch.nn.Linear(2, 2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_refused_with_the_reason(name):
    """The message names the model and what it can do."""
    model = OTHERS[name]()
    for run in (generate, generate_detailed):
        with pytest.raises(ConfigError, match=rf"^{run.__name__}: .*language model.*got {name}"):
            run(model, [[1, 2]], max_new_tokens=1)
    with pytest.raises(ConfigError, match=rf"^stream: .*language model.*got {name}"):
        stream(model, [1, 2], max_new_tokens=1)


def test_a_wrapped_language_model_still_generates():
    """A compiled model is no MambaLM by class, and runs all the same."""
    lm = MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=16))
    wrapped = torch.compile(lm, backend="eager")
    assert generate(wrapped, [[1, 2]], max_new_tokens=3) == generate(lm, [[1, 2]], max_new_tokens=3)
