"""How prompts are read: the head where logits are used, integers without opening all weights."""

import pytest
import torch

from anymamba.generate import generate, generate_detailed, stream
from anymamba.models import MambaLM, quantize_lm
from anymamba.nn import QuantizedLinear
from anymamba.ops import native_status
from anymamba.ops.decode import DecodeCall
from anymamba.settings import override
from decoder_cases import MODELS, model, tokens
from kernels import DECODERS
from laws import assert_same

DECODER = pytest.mark.skipif(not DECODERS, reason="no compiled kernels")
SCHEMES = pytest.mark.parametrize("scheme", ["int8", "int4"])
# The longest prompt that is short.
FEW = 24
SHORT = [[1, 2, 3, 4, 5], [6], [7, 8, 9, 10, 11]]


def read(lm, prompts, **options):
    """Return the logits after the prompts and the state, as generation has them."""
    logits = []
    look = {"processors": lambda _, logits_w: logits.append(logits_w.clone()) or logits_w}
    generate(lm, prompts, max_new_tokens=1, **look, **options)
    return torch.stack(logits), generate_detailed(lm, prompts, max_new_tokens=0, **options).cache


def count_calls(monkeypatch, cls):
    """Return a list that grows with every call of a layer's forward."""
    calls, forward = [], cls.forward
    monkeypatch.setattr(cls, "forward", lambda m, x: calls.append(m) or forward(m, x))
    return calls


def assert_same_fields(want, got):
    """Assert that two states are the same to rounding."""
    for name, tensor in want.to_tensors().items():
        if tensor.is_floating_point():
            assert_same(tensor, got.to_tensors()[name], name=name)
        else:
            assert torch.equal(tensor, got.to_tensors()[name]), name


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_the_head_is_computed_for_the_last_piece_only(scheme):
    """The logits of other pieces are not used; tokens and state are those of one piece."""
    lm = model("mamba3")
    if scheme is not None:
        quantize_lm(lm, scheme)
    ids, calls = tokens(FEW + 8).tolist(), []
    want = generate_detailed(lm, [ids], max_new_tokens=6)
    lm.lm_head.register_forward_hook(lambda *_: calls.append(1))
    cache = generate_detailed(lm, [ids], max_new_tokens=0, prefill_chunk=9).cache
    assert len(calls) == 1
    lm.lm_head._forward_hooks.clear()
    assert generate(lm, [ids], max_new_tokens=6, prefill_chunk=9) == want.ids
    whole = lm.prefill(torch.tensor([ids])).cache
    assert_same_fields(whole, cache)


@DECODER
@SCHEMES
@pytest.mark.parametrize("name", MODELS)
def test_a_short_prompt_of_integers_is_decoded(name, scheme, monkeypatch):
    """Bit by bit what steps give, for rows of any lengths, and no weight is opened."""
    lm = quantize_lm(model(name, d_model=48), scheme)
    want = []
    for ids in SHORT:
        cache = lm.empty_cache(1)
        for token in ids:
            logits_bw = lm.step_(torch.tensor([token]), cache, impl="native")
        want.append((logits_bw[0, : lm.config.vocab_size], cache))
    calls = count_calls(monkeypatch, QuantizedLinear)
    logits_bw, cache = read(lm, SHORT)
    assert calls == []
    for row, (expected_w, alone) in enumerate(want):
        assert torch.equal(logits_bw[row], expected_w)
        for field, tensor in cache.rows([row]).to_tensors().items():
            assert torch.equal(tensor, alone.to_tensors()[field]), field


@DECODER
def test_the_head_is_computed_for_the_last_token_only(monkeypatch):
    """Of a prompt that the decoder reads, and never to complete the state behind the last token."""
    lm = quantize_lm(model("mamba2", d_model=48), "int8")
    heads, run = [], DecodeCall.run
    monkeypatch.setattr(
        DecodeCall,
        "run",
        lambda c, i, logits: heads.append(logits is not None) or run(c, i, logits),
    )
    generate_detailed(lm, [[1, 2, 3, 4]], max_new_tokens=0)
    assert heads == [False, False, False, True]
    heads.clear()
    generate_detailed(lm, [[1]], max_new_tokens=3)
    assert heads == [True, True, True, False]


@DECODER
def test_how_long_a_short_prompt_is(monkeypatch):
    """The longest one that the decoder reads; one token more, and modules read it."""
    lm = quantize_lm(model("mamba2", d_model=48), "int8")
    calls = count_calls(monkeypatch, QuantizedLinear)
    generate_detailed(lm, tokens(1, FEW), max_new_tokens=0)
    assert calls == []
    generate_detailed(lm, tokens(1, FEW + 1), max_new_tokens=0)
    assert calls != []


@DECODER
@SCHEMES
@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3"])
def test_a_decoded_prompt_is_what_the_modules_read(name, scheme):
    """It loses beside the modules what any token of the decoder may lose."""
    bytes_too = native_status().variant in ("avx512_vnni", "avx512_bf16")
    share = 0.1 if scheme == "int4" else 1.2 if bytes_too else 0.01
    plain, lm = model(name), quantize_lm(model(name), scheme)
    ids_bs = tokens(8, 5)
    words = slice(lm.config.vocab_size)
    with torch.no_grad():
        exact = plain.prefill(ids_bs, num_last_tokens=1, impl="portable").logits[:, 0, words]
        quantized = lm.prefill(ids_bs, num_last_tokens=1, impl="portable").logits[:, 0, words]
    decoded, _ = read(lm, ids_bs)
    assert (decoded - quantized).norm() <= share * (quantized - exact).norm()


@pytest.mark.parametrize("why", ["long", "in pieces", "off", "hooked"])
def test_other_prompts_are_read_at_once(why, monkeypatch):
    """Token by token the modules would open every weight each time."""
    lm = quantize_lm(model("mamba2", d_model=48), "int8")
    calls = count_calls(monkeypatch, QuantizedLinear)
    length, options = 5, {}
    if why == "long":
        length = FEW + 1
    elif why == "in pieces":
        length, options = FEW + 1, {"prefill_chunk": FEW}
    elif why == "hooked":
        lm.backbone.layers[0].mixer.in_proj.register_forward_hook(lambda *_: None)
    ids_bs = tokens(1, length)
    pieces = 2 if why == "in pieces" else 1
    with override(native="off" if why == "off" else "auto"), torch.no_grad():
        generate_detailed(lm, ids_bs, max_new_tokens=0, **options)
        assert calls.count(lm.lm_head) == 1
        assert all(calls.count(layer) == pieces for layer in set(calls) - {lm.lm_head})
        logits_bw, cache = read(lm, ids_bs, **options)
        expected, want = lm.prefill(ids_bs, num_last_tokens=1)
    assert_same(expected[:, 0, : lm.config.vocab_size], logits_bw)
    assert_same_fields(want, cache)


def test_floating_point_is_read_at_once(monkeypatch):
    """Modules open nothing there, and read many tokens in the time of a few."""
    lm = model("mamba2")
    monkeypatch.setattr(MambaLM, "advance", None)
    assert int(stream(lm, [1, 2, 3], max_new_tokens=0).cache.position_b[0]) == 3


@DECODER
def test_a_decoded_prompt_goes_on_from_a_state(monkeypatch):
    """The caller's cache stays as it was, progress counts every token once."""
    lm = quantize_lm(model("mamba3", d_model=48), "int8")
    before = stream(lm, [1, 2, 3], max_new_tokens=0).cache
    kept, told = before.clone(), []
    calls = count_calls(monkeypatch, QuantizedLinear)
    how = {"max_new_tokens": 0, "progress": lambda *counts: told.append(counts)}
    after = stream(lm, [4, 5], cache=before, **how).cache
    assert calls == []
    assert told == [(2, 2)]
    whole = stream(lm, [1, 2, 3, 4, 5], max_new_tokens=0).cache
    for name, tensor in after.to_tensors().items():
        assert torch.equal(tensor, whole.to_tensors()[name]), name
        assert torch.equal(before.to_tensors()[name], kept.to_tensors()[name]), name
