"""Laws of tokens that repeat the last one's call: sooner, and in nothing different."""

import gc
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch

from anymamba.errors import BackendError, CacheError, ConfigError, DtypeError, ShapeError
from anymamba.models import MambaLM, quantize_lm
from anymamba.nn import ModelCache
from anymamba.settings import override
from decoder_cases import MODELS, assert_near_states, model, tokens, used_cache
from kernels import DECODERS, running
from laws import TOLERANCE

pytestmark = pytest.mark.skipif(not DECODERS, reason="no compiled kernels")
LAST = DECODERS[-1] if DECODERS else ""


def assert_equal_states(want: ModelCache, got: ModelCache) -> None:
    for name, tensor in want.to_tensors().items():
        assert torch.equal(tensor, got.to_tensors()[name]), name


@pytest.fixture
def lm():
    return model("mamba2")


@pytest.fixture
def checked(monkeypatch):
    """Count the tokens that were checked in all respects: the others repeat the one before."""
    found, check = [], MambaLM._check_token

    def counted(*arguments):
        found.append(arguments)
        return check(*arguments)

    monkeypatch.setattr(MambaLM, "_check_token", counted)
    return found


@pytest.mark.parametrize("verb", ["step_", "advance"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("name", MODELS)
def test_repeated_tokens_are_tokens(name, rows, dtype, verb, checked):
    """Under a promise logits and states have the bits that they have without one."""
    lm = model(name, dtype)
    want, got = used_cache(lm, rows), used_cache(lm, rows)
    ids_nb = tokens(4, rows)
    expected = [lm.step_(ids_b, want, impl="native") for ids_b in ids_nb]
    checked.clear()
    with lm.unchanged():
        for ids_b, want_bw in zip(ids_nb, expected, strict=True):
            result = getattr(lm, verb)(ids_b, got, impl="native")
            logits_bw = result if verb == "step_" else result.logits
            assert logits_bw.dtype == dtype
            assert torch.equal(logits_bw, want_bw)
    assert_equal_states(want, got)
    assert len(checked) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_rounded_once(dtype):
    """Those of half types are the sums that land in float32, rounded."""
    lm = model("mamba1", dtype, vocab_size=1000, d_model=40)
    for kind in DECODERS:
        with running(kind):
            for rows in (1, 5):
                cache, landing_bw = used_cache(lm, rows), torch.empty(rows, 1000)
                ids_b = tokens(rows)
                logits_bw = lm.step_(ids_b, cache.clone(), impl="native")
                landed_bw, _ = lm.advance(ids_b, cache, impl="native", landing_bw=landing_bw)
                assert landed_bw is landing_bw
                assert torch.equal(logits_bw, landing_bw.to(dtype))


def test_states_move_on_without_the_head(lm):
    """`advance_state` repeats too, and takes turns with the others."""
    want, got, ids_nb = used_cache(lm, 2), used_cache(lm, 2), tokens(5, 2)
    for ids_b in ids_nb:
        expected_bw = lm.step_(ids_b, want, impl="native")
    with lm.unchanged():
        for ids_b in ids_nb[:-1]:
            assert lm.advance_state(ids_b, got) is got
        assert torch.equal(lm.step_(ids_nb[-1], got), expected_bw)
    assert_equal_states(want, got)


def test_two_caches_take_turns(lm, checked):
    """A token on another cache is checked anew, and neither writes into the other's memory."""
    caches = [used_cache(lm, 2) for _ in range(2)]
    alone = [cache.clone() for cache in caches]
    ids_nb = tokens(6, 2)
    for place, ids_b in enumerate(ids_nb):
        lm.step_(ids_b, alone[place % 2], impl="native")
    checked.clear()
    with lm.unchanged():
        for place, ids_b in enumerate(ids_nb):
            lm.step_(ids_b, caches[place % 2], impl="native")
    for want, got in zip(alone, caches, strict=True):
        assert_equal_states(want, got)
    assert len(checked) == len(ids_nb)


MISTAKES = {
    "an unknown id": (torch.tensor([1, 99]), ConfigError),
    "a negative id": (torch.tensor([1, -1]), ConfigError),
    "too few rows": (torch.tensor([1]), CacheError),
    "two axes": (torch.tensor([[1], [2]]), ShapeError),
    "no axis": (torch.tensor(1), ShapeError),
    "no ids": (torch.tensor([], dtype=torch.int64), ShapeError),
    "numbers": (torch.tensor([1.0, 2.0]), DtypeError),
    "truths": (torch.tensor([True, False]), DtypeError),
    "bytes": (torch.tensor([1, 2], dtype=torch.uint8), DtypeError),
    "a list": ([1, 2], DtypeError),
}


@pytest.mark.parametrize("verb", ["step_", "advance", "advance_state"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_as_at_the_first_token(lm, mistake, verb):
    """Wrong ids are the same error after a right token, and leave the state."""
    ids_b, error = MISTAKES[mistake]
    cache = used_cache(lm, 2)
    with lm.unchanged():
        lm.step_(tokens(2), cache)
        before = cache.clone()
        with pytest.raises(error):
            getattr(lm, verb)(ids_b, cache)
        assert_equal_states(before, cache)
        with pytest.raises(ConfigError, match="impl"):
            lm.step_(tokens(2), cache, impl="natve")
        with pytest.raises(ShapeError, match="landing_bw"):
            lm.advance(tokens(2), cache, landing_bw=torch.empty(2, 1))
    assert_equal_states(before, cache)


@pytest.mark.parametrize(
    "ids_b",
    [tokens(4)[::2], tokens(2).to(torch.int32), torch.stack([tokens(2)] * 2).T[:, 0]],
    ids=["strided", "int32", "column"],
)
def test_ids_of_any_layout(lm, ids_b):
    """What was accepted at the first token is accepted at the others, and means the same."""
    want, got = used_cache(lm, 2), used_cache(lm, 2)
    with lm.unchanged():
        for ids in (tokens(2, seed=5), ids_b):
            lm.step_(ids.to(torch.int64).contiguous(), want, impl="portable")
            lm.step_(ids, got, impl="native")
    assert_near_states(want, got, TOLERANCE[torch.float32, "value"])


@pytest.mark.parametrize("change", ["off", "deny_nan", "autocast", "transform"])
def test_other_circumstances_are_noticed(lm, change, checked):
    """What sends a first token through the modules sends any there; then tokens repeat again."""
    cache, ids_b = used_cache(lm, 2), tokens(2)
    contexts = {
        "off": lambda: override(native="off"),
        "deny_nan": lambda: override(deny_nan=True),
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    }
    with lm.unchanged():
        lm.step_(tokens(2), cache, impl="native")
        checked.clear()
        if change == "transform":
            with pytest.raises(BackendError, match=r"torch\.func"):
                torch.func.vmap(lambda _: lm.step_(ids_b, cache, impl="native"))(torch.ones(2))
        else:
            with contexts[change](), pytest.raises(BackendError, match="cannot serve"):
                lm.step_(tokens(2), cache, impl="native")
        assert len(checked) == 1
        lm.step_(tokens(2), cache, impl="native")
    assert len(checked) == 1


@pytest.mark.skipif(len(DECODERS) < 2, reason="one instruction set only")
def test_another_instruction_set_is_obeyed():
    """A set that is forced between two tokens runs the next one."""
    lm = model("mamba1", torch.bfloat16, d_model=40)
    start, ids_b = used_cache(lm, 2), tokens(2)
    results = {}
    for kind in DECODERS:
        with running(kind):
            results[kind] = lm.step_(ids_b, start.clone(), impl="native")
    assert not torch.equal(results[DECODERS[0]], results[LAST])
    with lm.unchanged():
        for kind in (LAST, DECODERS[0]):
            cache = start.clone()
            again = cache.map(torch.clone)
            with running(LAST):
                lm.step_(ids_b, cache, impl="native")
            cache.assign_(again)
            with running(kind):
                assert torch.equal(lm.step_(ids_b, cache, impl="native"), results[kind])


def test_a_state_that_was_moved_is_found(lm, checked):
    """Memory put under a state between two tokens is what the next one reads and writes."""
    cache, other = used_cache(lm, 2), used_cache(lm, 2)
    want = used_cache(lm, 2)
    with lm.unchanged():
        lm.step_(tokens(2, seed=4), cache, impl="native")
        checked.clear()
        for tensor, new in zip(
            cache.to_tensors().values(), other.to_tensors().values(), strict=True
        ):
            tensor.data = new.clone()
        got_bw = lm.step_(tokens(2), cache, impl="native")
    assert len(checked) == 1
    assert torch.equal(got_bw, lm.step_(tokens(2), want, impl="native"))
    assert_equal_states(want, cache)


def test_a_state_that_wants_gradients_is_refused(lm):
    """As it is at the first token: nothing may be written into it."""
    cache = used_cache(lm, 2)
    with lm.unchanged():
        lm.step_(tokens(2), cache, impl="native")
        cache.requires_grad_()
        with pytest.raises(BackendError, match="need no gradient"):
            lm.step_(tokens(2), cache, impl="native")


@pytest.mark.parametrize("promised", [True, False])
def test_a_state_of_inference_mode_is_refused_outside(lm, promised):
    """Also if it was decoded with inside just before."""
    with lm.unchanged() if promised else nullcontext():
        with torch.inference_mode():
            cache = lm.empty_cache(2)
            lm.step_(tokens(2), cache, impl="native")
        with pytest.raises(BackendError, match="made in inference mode"):
            lm.step_(tokens(2), cache, impl="native")
    assert cache.position_b.tolist() == [1, 1]


def test_what_another_thread_decoded_with_is_noticed(lm):
    """A promise of this thread cannot bind another, whose new weights must not be read half."""
    cache, ids_b = used_cache(lm, 2), tokens(2)

    def change() -> None:
        head = lm.backbone.embedding.weight
        head.data = torch.randn_like(head)
        lm.step_(ids_b, used_cache(lm, 2), impl="native")

    with lm.unchanged():
        lm.step_(ids_b, cache, impl="native")
        want = cache.clone()
        other = threading.Thread(target=change)
        other.start()
        other.join(60)
        with pytest.raises(ConfigError):
            lm.step_(torch.tensor([1, 99]), cache)
        got_bw = lm.step_(ids_b, cache, impl="native")
    assert torch.equal(got_bw, lm.step_(ids_b, want, impl="native"))
    assert_equal_states(want, cache)


def test_an_embedding_of_float64_runs_as_modules():
    """Logits are float32 or a half type in the decoder, also where integers are dequantised."""
    lm = quantize_lm(model("mamba2", d_model=36), "int8")
    lm.backbone.embedding.double()
    with pytest.raises(BackendError, match="float64"):
        lm.step_(
            tokens(2),
            used_cache(quantize_lm(model("mamba2", d_model=36), "int8"), 2),
            impl="native",
        )


def test_a_promise_that_ends_keeps_nothing(lm):
    """Behind the promise the cache is nobody's but the caller's."""
    cache = used_cache(lm, 2)
    known = weakref.ref(cache.layers[0].ssm_bhpr)
    with lm.unchanged():
        lm.step_(tokens(2), cache, impl="native")
    del cache
    gc.collect()
    assert known() is None


def test_two_threads_keep_their_own(lm):
    """Each thread repeats its own tokens; states and logits are those of one after the other."""
    ids_nb, results = tokens(40, 2), {}

    def decode(name: str, cache: ModelCache) -> None:
        with lm.unchanged():
            for ids_b in ids_nb:
                logits_bw = lm.step_(ids_b, cache, impl="native")
        results[name] = logits_bw, cache

    caches = [used_cache(lm, 2) for _ in range(2)]
    threads = [
        threading.Thread(target=decode, args=(str(place), cache))
        for place, cache in enumerate(caches)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    decode("alone", used_cache(lm, 2))
    for place in ("0", "1"):
        assert torch.equal(results[place][0], results["alone"][0])
        assert_equal_states(results["alone"][1], results[place][1])
