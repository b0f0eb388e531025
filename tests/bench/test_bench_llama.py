"""Laws of the peer llama.cpp: the same model, in its files and its kernels."""

import pytest
import torch

from anymamba.bench import LlamaFiles, decode_figures, has_llama, llama_files, lm_case
from anymamba.models import MambaConfig, MambaLM
from kernels import NATIVE

LAYERS = {
    "Mamba1": {"layer": "Mamba1"},
    "Mamba2": {"layer": "Mamba2", "headdim": 16, "d_state": 32},
    "Mamba2 groups": {"layer": "Mamba2", "headdim": 16, "d_state": 32, "ngroups": 2},
}
needs_llama = pytest.mark.skipif(not has_llama(), reason="llama.cpp is not installed")


def model(layer, **more):
    torch.manual_seed(0)
    # Its integer formats have blocks of 32, and the head's of 256.
    config = MambaConfig(
        d_model=256, n_layer=2, vocab_size=50, ssm_cfg=LAYERS.get(layer, {"layer": layer}), **more
    )
    return MambaLM(config)


def error(want, got):
    return float((want - got).abs().max() / want.abs().max())


@needs_llama
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_prompts_and_steps_give_our_logits(layer, tied):
    """A prompt longer than its piece, then tokens after it; and a second prompt from the start."""
    lm = model(layer, tie_embeddings=tied)
    ids_s = torch.arange(530) * 7 % 50
    llama = LlamaFiles(lm).open("float32")
    with torch.no_grad():
        want_w, cache = lm.prefill(ids_s[None], num_last_tokens=1)
        assert error(want_w[0, 0], llama.read(ids_s)) < 1e-4
        for token in (3, 4):
            want_bw, cache = lm.step(torch.tensor([token]), cache)
            assert error(want_bw, llama.step(torch.tensor([token]))) < 1e-4
        want_w = lm(ids_s[None, :5])[0, -1]
    assert error(want_w, llama.read(ids_s[:5])) < 1e-4


@needs_llama
def test_rows_decode_side_by_side():
    """Several sequences in one call, each with its own state."""
    lm = model("Mamba2")
    llama = LlamaFiles(lm).open("float32", rows=3)
    cache = lm.empty_cache(3)
    for tokens in ([1, 2, 3], [4, 4, 4]):
        ids_b = torch.tensor(tokens)
        with torch.no_grad():
            want_bw, cache = lm.step(ids_b, cache)
        assert error(want_bw, llama.step(ids_b)) < 1e-4


@needs_llama
def test_formats_shrink_and_stay_near():
    """It converts by itself; fewer bits are fewer bytes and a larger error."""
    files = LlamaFiles(model("Mamba1"))
    ids_s = torch.arange(20)
    want = files.open("float32").read(ids_s)
    sizes, errors = [], []
    for form in ("float32", "bfloat16", "int8", "int4"):
        llama = files.open(form)
        sizes.append(llama.weight_bytes)
        errors.append(error(want, llama.read(ids_s)))
    assert sizes == sorted(sizes, reverse=True)
    assert errors[0] == 0
    assert errors[1] < 0.05
    assert errors[2] < 0.05
    assert errors[3] < 0.5


def test_what_it_lacks_is_said():
    """Mamba-3 does not exist there, whether it is installed or not."""
    assert llama_files(model("Mamba3")) == "llama.cpp has no Mamba-3"


def test_an_absent_peer_names_its_extra(monkeypatch):
    """The sentence says what to install."""
    monkeypatch.setattr("anymamba.bench.llama.has_llama", lambda: False)
    assert "anymamba[llama]" in str(llama_files(model("Mamba1")))


@needs_llama
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_has_a_column_beside_ours(dtype):
    """Through the gate, with a time, and without a figure for memory that nobody saw."""
    from anymamba.bench import Effort, measure

    case = lm_case("toy", 40, "forward", model("Mamba2").config, dtype=dtype)
    rows = {row.way: row for row in measure(case, Effort(0.01, 1, 1))}
    assert rows["llama.cpp"].ok, rows["llama.cpp"].error
    assert rows["llama.cpp"].timing
    assert rows["llama.cpp"].peak == 0


@needs_llama
@pytest.mark.skipif(not NATIVE, reason="no compiled kernels")
def test_it_decodes_in_turns_with_ours():
    """Every format, rightly, with as many tokens."""
    config = model("Mamba2").config
    pairs = list(decode_figures(["toy"], tokens=12, rows=(2,), configs={"toy": config}))
    assert len(pairs) == 4
    for ours, theirs in pairs:
        assert (ours.engine, theirs.engine) == ("anymamba", "llama.cpp")
        assert ours.ok
        assert theirs.ok, (theirs.format, theirs.error)
        assert len(ours.seconds) == len(theirs.seconds) == 12
