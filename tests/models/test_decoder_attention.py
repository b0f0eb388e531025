"""Laws of hybrids in the native decoder: attention computes what its modules compute."""

import pytest
import torch

from anymamba.errors import BackendError
from anymamba.generate import generate, generate_detailed, stream
from anymamba.models import MambaLM, count_model, quantize_lm
from anymamba.nn import KVCache, ModelCache
from decoder_cases import (
    HYBRIDS,
    VOCABULARY,
    clearest,
    merge_lora,
    model,
    round_activations,
    tokens,
    used_cache,
)
from kernels import DECODERS, running
from laws import assert_same, error_of

pytestmark = pytest.mark.skipif(not DECODERS, reason="no compiled kernels")
KINDS = pytest.mark.parametrize("kind", DECODERS)
NAMES = pytest.mark.parametrize("name", HYBRIDS)


def visible(cache: ModelCache) -> ModelCache:
    """Return a cache whose keys and values end with each row's own past: the rest is never read."""

    def cut(layer):
        if not isinstance(layer, KVCache):
            return layer
        longest = int(layer.length_b.max())
        is_past = torch.arange(longest)[:, None] < layer.length_b[:, None, None, None]
        k_bhst, v_bhst = (past[:, :, :longest] * is_past for past in layer[:2])
        return layer._replace(k_bhst=k_bhst, v_bhst=v_bhst)

    return cache._replace(layers=tuple(map(cut, cache.layers)))


def assert_same_states(want: ModelCache, got: ModelCache, same=assert_same) -> None:
    want, got = visible(want), visible(got)
    assert [type(layer) for layer in want.layers] == [type(layer) for layer in got.layers]
    for name, expected in want.to_tensors().items():
        actual = got.to_tensors()[name]
        assert expected.dtype == actual.dtype, name
        if expected.is_floating_point():
            if "angle" in name:  # no seam at a half turn
                expected, actual = expected.cos(), actual.cos()
            same(expected, actual, name=name)
        else:
            assert torch.equal(expected, actual), name


def assert_equal(expected, actual, name):
    assert torch.equal(expected, actual), name


def ragged_cache(lm: MambaLM, lengths: list[int]) -> ModelCache:
    """Return rows with pasts of different lengths; a length of zero is an empty row."""
    with torch.no_grad():
        return ModelCache.join(
            [
                lm.prefill(tokens(1, length, seed=length), impl="portable").cache
                if length
                else lm.empty_cache(1)
                for length in lengths
            ]
        )


@KINDS
@NAMES
@pytest.mark.parametrize("lengths", [[0], [1, 63], [64, 2, 65, 0, 5, 130, 7]])
def test_decoder_equals_modules(name, lengths, kind):
    """Logits and every field of the state are those of the modules, token after token."""
    lm = model(name)
    want = ragged_cache(lm, lengths)
    got = want.clone()
    with running(kind), torch.no_grad():
        for ids_b in tokens(4, len(lengths)):
            expected, want = lm.step(ids_b, want, impl="portable")
            logits_bw, got = lm.advance(ids_b, got, impl="native")
            assert_same(expected, logits_bw)
    assert_same_states(want, got)


@KINDS
@NAMES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_equal_the_wide_model(name, dtype, kind):
    """Half weights give the logits of the same numbers in float32, to the rounding of halves."""
    lm, wide = model(name, dtype), model(name)
    wide.load_state_dict(lm.state_dict())
    got = ragged_cache(lm, [3, 70, 130])
    want = got.to(torch.float32)
    with running(kind), torch.no_grad():
        for ids_b in tokens(4, 3):
            expected, want = wide.step(ids_b, want, impl="portable")
            logits_bw, got = lm.advance(ids_b, got, impl="native")
    assert logits_bw.dtype == dtype
    # Keys and values of the past are halves; so is, on some CPUs, what meets a matrix of bfloat16.
    assert error_of(expected, logits_bw.float()) <= (3e-2 if dtype == torch.bfloat16 else 4e-3)
    assert got.layers[HYBRIDS[name]["attn_layer_idx"][0]].k_bhst.dtype == dtype


@KINDS
@NAMES
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_integers_equal_their_dequantised_weights(name, scheme, kind, monkeypatch):
    """A quantised hybrid decodes as its modules do with activations in the same blocks."""
    lm = quantize_lm(model(name, d_model=48), scheme)
    want, ids_nb, logits_nbw, margins = ragged_cache(lm, [3, 70] * 16), tokens(3, 32), [], []
    start = want.clone()
    left = round_activations(monkeypatch, scheme, kind, margins)
    with running(kind), torch.no_grad():
        for ids_b in ids_nb:
            logits_bw, want = lm.step(ids_b, want, impl="portable")
            logits_nbw.append(logits_bw)
        chosen = clearest(margins, 3)
        got = start.rows(chosen).clone()
        for ids_b, logits_bw in zip(ids_nb, logits_nbw, strict=True):
            actual, got = lm.advance(ids_b[chosen], got, impl="native")
            assert error_of(logits_bw[chosen], actual) <= left


@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_hybrids_have_the_states_of_plain_ones(name, dtype):
    """Shapes, dtypes and counted bytes: a layer may be without a single parameter."""
    plain = model(name, dtype, d_model=48)
    want = used_cache(plain, 2)
    lm = quantize_lm(model(name, dtype, d_model=48), "int8")
    for cache in (lm.empty_cache(2), used_cache(lm, 2)):
        for field, tensor in cache.to_tensors().items():
            assert tensor.dtype == want.to_tensors()[field].dtype, field
    assert count_model(lm, length=64).state_bytes == count_model(plain, length=64).state_bytes


@KINDS
@NAMES
def test_rows_do_not_know_each_other(name, kind):
    """A row among others, with more room than it needs, has the bits of that row alone."""
    lm = model(name)
    lengths = [66, 1, 0, 64]
    together, ids_nb = ragged_cache(lm, lengths), tokens(3, 4)
    alone = [ragged_cache(lm, [length]) for length in lengths]
    with running(kind), torch.no_grad():
        for ids_b in ids_nb:
            logits_bw, together = lm.advance(ids_b, together, impl="native")
            for row, logits_w in enumerate(logits_bw):
                own_1w, alone[row] = lm.advance(ids_b[[row]], alone[row], impl="native")
                assert torch.equal(own_1w[0], logits_w), row
    for row, cache in enumerate(alone):
        assert_same_states(cache, together.rows([row]), assert_equal)


@NAMES
def test_no_bit_depends_on_the_threads(name):
    """Heads are divided among threads, sums are not."""
    lm, found = model(name), []
    start, threads = used_cache(lm, 3), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            cache = start.clone()
            with torch.no_grad():
                for ids_b in tokens(3, 3):
                    logits_bw, cache = lm.advance(ids_b, cache, impl="native")
            found.append((logits_bw, cache))
    finally:
        torch.set_num_threads(threads)
    for logits_bw, cache in found[1:]:
        assert torch.equal(logits_bw, found[0][0])
        assert_same_states(found[0][1], cache, assert_equal)


@torch.no_grad()
def test_keys_grow_seldom():
    """A full cache is left alone and returned larger; one with room is written to and returned."""
    lm = model("turned halves")
    full = used_cache(lm, 2)
    before = full.clone()
    _, cache = lm.advance(tokens(2), full, impl="native")
    for name, tensor in full.to_tensors().items():
        assert torch.equal(tensor, before.to_tensors()[name]), name
    places = cache.layers[1].k_bhst.shape[2]
    sizes = {places}
    for length in range(6, 306):
        _, new = lm.advance(tokens(2), cache, impl="native")
        assert (new is cache) == (length < places)
        cache, places = new, new.layers[1].k_bhst.shape[2]
        sizes.add(places)
    assert 306 <= places <= 306 + 64
    assert len(sizes) < 8
    assert torch.equal(cache.layers[1].length_b, torch.tensor([306, 306]))
    assert torch.equal(cache.position_b, torch.tensor([306, 306]))


@NAMES
@torch.no_grad()
def test_a_pure_step_has_the_shapes_of_the_modules(name):
    """`step` leaves the given cache alone, whoever runs it, and returns states of one shape."""
    lm = model(name)
    cache, ids_b = used_cache(lm, 2), tokens(2)
    before = cache.clone()
    want, got = (lm.step(ids_b, cache, impl=impl) for impl in ("portable", "native"))
    assert_same(want.logits, got.logits)
    for field, tensor in want.cache.to_tensors().items():
        assert tensor.shape == got.cache.to_tensors()[field].shape, field
        assert torch.equal(cache.to_tensors()[field], before.to_tensors()[field]), field


@NAMES
@torch.no_grad()
def test_decoded_states_go_on_anywhere(name):
    """What was decoded goes on through modules: steps, a prompt, selected rows."""
    lm = model(name)
    want, got = used_cache(lm, 3), used_cache(lm, 3)
    for ids_b in tokens(3, 3):
        want = lm.step(ids_b, want, impl="portable").cache
        got = lm.advance(ids_b, got, impl="native").cache
    for places in ([2, 0], [1, 0]):
        want, got = want.rows(places), got.rows(places)
        piece_bs, ids_b = tokens(2, 4, seed=5), tokens(2, seed=6)
        expected, want = lm.prefill(piece_bs, want, impl="portable")
        logits_bsw, got = lm.prefill(piece_bs, got, impl="portable")
        assert_same(expected, logits_bsw)
        want = lm.step(ids_b, want, impl="portable").cache
        got = lm.advance(ids_b, got, impl="native").cache
    assert_same_states(want, got)


@torch.no_grad()
def test_late_positions_turn_exactly():
    """After a million tokens an angle still has its fraction of a turn."""
    lm, place = model("turned halves"), 1_000_003
    cache = used_cache(lm, 1)
    past = torch.zeros(1, 1, place + 1, 6)
    past[:, :, place - 9 : place] = torch.randn(9, 6)
    late = KVCache(past, past.clone(), torch.tensor([place]))
    cache = cache._replace(layers=(cache.layers[0], late))
    ids_b = tokens(1)
    want = lm.step(ids_b, cache, impl="portable")
    got = lm.advance(ids_b, cache, impl="native")
    assert got.cache is cache
    assert_same(want.cache.layers[1].k_bhst[:, :, place], late.k_bhst[:, :, place])
    assert_same(want.logits, got.logits)


@pytest.mark.parametrize("scheme", [None, "int8"])
@NAMES
def test_greedy_tokens_are_those_of_the_modules(name, scheme):
    """Ragged prompts continue with the same tokens; in integers, with those of a row alone."""
    lm = model(name) if scheme is None else quantize_lm(model(name, d_model=48), scheme)
    prompts = [[1, 2, 3], [4], list(range(VOCABULARY)) * 2]
    found = generate(lm, prompts, max_new_tokens=80)
    if scheme is None:
        with running("portable"):
            assert generate(lm, prompts, max_new_tokens=80) == found
    for prompt, ids in zip(prompts, found, strict=True):
        assert list(stream(lm, prompt, max_new_tokens=80)) == ids


@torch.no_grad()
def test_the_returned_state_goes_on():
    """A text in two parts is the text in one."""
    lm = model("turned neighbours")
    whole = generate(lm, [[1, 2], [3]], max_new_tokens=90)
    first = generate_detailed(lm, [[1, 2], [3]], max_new_tokens=40)
    newest = [[ids[-1]] for ids in first.ids]
    # The state has read all of the first part, so the second begins with a token of its own.
    again = generate_detailed(lm, [[1, 2], [3]], max_new_tokens=39)
    second = generate(lm, newest, max_new_tokens=50, cache=again.cache)
    assert [a + b for a, b in zip(first.ids, second, strict=True)] == whole


def test_hooks_and_new_weights_are_seen():
    """Attention is watched as every other layer: nothing is bypassed, nothing is stale."""
    lm, ids_b = model("turned halves"), tokens(2)
    cache = used_cache(lm, 2)
    with torch.no_grad():
        lm.advance(ids_b, cache, impl="native")
        merge_lora(lm)
        want = lm.step(ids_b, cache, impl="portable").logits
        assert_same(want, lm.step(ids_b, cache, impl="native").logits)
        attention = lm.backbone.layers[1].mixer
        for change in (
            {"rotary_emb_base": 3.0},
            {"softmax_scale": 2.0},
            {"pairing": "interleaved"},
        ):
            before = want
            vars(attention).update(change)
            want = lm.step(ids_b, cache, impl="portable").logits
            assert error_of(before, want) > 1e-4, change
            assert_same(want, lm.step(ids_b, cache, impl="native").logits)
        calls = []
        attention.out_proj.register_forward_hook(lambda *_: calls.append(1))
        lm.advance(ids_b, cache)
        assert calls == [1]
        with pytest.raises(BackendError, match="without hooks"):
            lm.advance(ids_b, cache, impl="native")


def of_one_direction(name):
    """Return a hybrid whose queries are ones, whatever the token: scores are sums of keys."""
    lm = model(name)
    mixer = lm.backbone.layers[1].mixer
    with torch.no_grad():
        mixer.in_proj.weight[:12].zero_()
        mixer.in_proj.bias[:12] = 1.0
    mixer.rotary_emb_dim = 0
    return lm


def attended(lm, keys_sd, values_sd, impl):
    """Return the logits after one token of a row with this past."""
    past = KVCache(keys_sd[None, None], values_sd[None, None], torch.tensor([len(keys_sd)]))
    cache = lm.empty_cache(1)
    cache = cache._replace(layers=(cache.layers[0], past))
    with torch.no_grad():
        return lm.step(tokens(1), cache, impl=impl).logits


@KINDS
@pytest.mark.parametrize("hidden", [64, 130])
def test_scores_of_minus_infinity_weigh_nothing(hidden, kind):
    """Keys so long that a score overflows are forgotten, even a whole block of them."""
    lm = of_one_direction("turned halves")
    torch.manual_seed(0)
    keys_sd, values_sd = torch.randn(hidden + 6, 6), torch.randn(hidden + 6, 6)
    keys_sd[:hidden] = -3e38
    want = attended(lm, keys_sd, values_sd, "portable")
    assert want.isfinite().all()
    with running(kind):
        assert_same(want, attended(lm, keys_sd, values_sd, "native"))


@KINDS
def test_long_pasts_lose_nothing(kind):
    """What each of many thousand values adds is not lost in their sum."""
    lm = of_one_direction("turned halves")
    keys_sd, values_sd = torch.zeros(50_000, 6), torch.full((50_000, 6), 1.1)
    with running(kind):
        got = attended(lm, keys_sd, values_sd, "native")
    want = attended(lm.double(), keys_sd.double(), values_sd.double(), "portable")
    assert error_of(want.float(), got) <= 5e-6
