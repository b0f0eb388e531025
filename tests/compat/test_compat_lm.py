"""`MambaLMHeadModel`: official call, official result, official generation."""

from types import SimpleNamespace

import pytest
import torch

from anymamba.compat import MambaLMHeadModel
from anymamba.errors import AnyMambaError
from anymamba.models import MambaConfig, MambaLM

CONFIG = MambaConfig(
    d_model=16, n_layer=2, vocab_size=37, ssm_cfg={"layer": "Mamba3", "d_state": 8, "headdim": 8}
)


def model():
    torch.manual_seed(0)
    return MambaLMHeadModel(CONFIG)


def test_forward_returns_named_logits():
    """The result has `.logits`, equal to those of `MambaLM`; an official config object is taken."""
    lm, ids = model(), torch.randint(37, (2, 9))
    plain = MambaLM(CONFIG)
    plain.load_state_dict(lm.state_dict())
    torch.testing.assert_close(lm(ids).logits, plain(ids))
    torch.testing.assert_close(lm(ids, num_last_tokens=1).logits, plain(ids)[:, -1:])
    official = SimpleNamespace(**CONFIG.to_dict())
    assert MambaLMHeadModel(official).config.to_dict() == CONFIG.to_dict()


def test_inference_params_continue_the_state():
    """Prefill, then single tokens through the official object, equal the whole."""
    lm, ids = model(), torch.randint(37, (2, 9))
    params = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    pieces = [lm(ids[:, :5], inference_params=params).logits]
    for place in range(5, 9):
        params.seqlen_offset = place
        pieces.append(lm(ids[:, place : place + 1], inference_params=params).logits)
    torch.testing.assert_close(torch.cat(pieces, 1), lm(ids).logits, rtol=1e-4, atol=1e-5)


def test_generate_returns_whole_sequences():
    """Greedy generation equals the argmax of recomputed prefixes; max_length counts the prompt."""
    lm, ids = model(), torch.randint(37, (2, 4))
    got = lm.generate(ids, max_length=9)
    want = ids
    for _ in range(5):
        want = torch.cat([want, lm(want).logits[:, -1:, :37].argmax(-1)], 1)
    assert torch.equal(want, got)
    assert torch.equal(lm.generate(ids, 9, return_dict_in_generate=True, cg=True).sequences, want)
    stopped = lm.generate(ids, 9, eos_token_id=int(want[0, 4]))
    assert stopped.shape[1] <= 9
    assert (stopped[0, 4:] == want[0, 4]).all()
    with pytest.raises(AnyMambaError, match="max_length counts the prompt"):
        lm.generate(ids, max_length=4)
