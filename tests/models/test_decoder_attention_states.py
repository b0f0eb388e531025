"""What the decoder refuses of hybrids, and what it leaves to the modules."""

import pytest
import torch

from anymamba.errors import BackendError, CacheError
from anymamba.models import native_refusal
from anymamba.nn import with_room
from decoder_cases import model, tokens, used_cache
from kernels import NATIVE
from laws import assert_same

pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiled kernels")


def narrow(layer):
    return layer._replace(k_bhst=layer.k_bhst[..., :3])


MISTAKES = {
    "a length that does not fit": (lambda x: x._replace(length_b=x.length_b + 9), "length_b"),
    "a negative length": (lambda x: x._replace(length_b=x.length_b - 9), "length_b"),
    "lengths in two axes": (lambda x: x._replace(length_b=x.length_b[:, None]), "shape"),
    "lengths of three rows": (lambda x: x._replace(length_b=torch.tensor([5, 5, 5])), "shape"),
    "heads of another width": (narrow, "shape"),
    "fewer values than keys": (lambda x: x._replace(v_bhst=x.v_bhst[:, :, 1:]), "shape"),
    "another convolution": (lambda x: x._replace(conv_bvk=torch.zeros(2, 24, 4)), "convolution"),
}


@pytest.mark.parametrize("impl", ["auto", "native", "portable"])
@pytest.mark.parametrize("verb", ["step", "advance"])
@pytest.mark.parametrize("mistake", MISTAKES)
@torch.no_grad()
def test_rejects_states_that_do_not_fit(mistake, verb, impl):
    """The kernel reads as far as a state says; one that says wrong is refused, and left alone."""
    change, word = MISTAKES[mistake]
    lm = model("turned halves")
    cache = used_cache(lm, 2)
    cache = cache._replace(layers=(cache.layers[0], change(cache.layers[1])))
    before = cache.clone()
    with pytest.raises(CacheError, match=word):
        getattr(lm, verb)(tokens(2), cache, impl=impl)
    for name, tensor in cache.to_tensors().items():
        assert torch.equal(tensor, before.to_tensors()[name]), name


def test_a_message_shows_the_shape_that_was_given():
    """Room is made behind the checks."""
    lm = model("turned halves")
    cache = used_cache(lm, 2)
    cache = cache._replace(layers=(cache.layers[0], cache.layers[1].rows([0])))
    with pytest.raises(CacheError, match=r"\(2, 1, 5, 6\); got \(1, 1, 5, 6\)"):
        lm.advance(tokens(2), cache, impl="native")


SHARED = {
    "one count for all": lambda cache, x: x._replace(length_b=cache.position_b),
    "keys that are values": lambda cache, x: x._replace(v_bhst=x.k_bhst),
    "keys beside values": lambda cache, x: x._replace(
        **dict(zip(("k_bhst", "v_bhst"), torch.zeros(2, 1, 16, 6).split(8, 2), strict=True))
    ),
}


@pytest.mark.parametrize("way", SHARED)
@torch.no_grad()
def test_states_that_share_memory_run_as_modules(way):
    """Each would be written for all of them."""
    lm, ids_b = model("turned halves"), tokens(2)
    cache = with_room(used_cache(lm, 2), 3)
    cache = cache._replace(layers=(cache.layers[0], SHARED[way](cache, cache.layers[1])))
    want = lm.step(ids_b, cache, impl="portable")
    if way != "keys beside values":  # which are not in one piece, and copied for it
        with pytest.raises(BackendError, match="share a piece"):
            lm.advance(ids_b, cache, impl="native")
    got = lm.advance(ids_b, cache)
    assert_same(want.logits, got.logits)
    assert torch.equal(want.cache.position_b, got.cache.position_b)


@torch.no_grad()
def test_options_that_are_tensors_run_as_modules():
    """A tensor may change and be the same, so nothing could watch it."""
    lm, ids_b = model("turned halves"), tokens(2)
    cache, mixer = used_cache(lm, 2), lm.backbone.layers[1].mixer
    for base in (torch.tensor(100.0), torch.nn.Parameter(torch.tensor(100.0))):
        del mixer.rotary_emb_base
        mixer.rotary_emb_base = base
        with pytest.raises(BackendError, match="rotary_emb_base of MHA must be a plain value"):
            lm.step(ids_b, cache, impl="native")
        want = lm.step(ids_b, cache, impl="portable").logits
        assert torch.equal(want, lm.step(ids_b, cache).logits)


def test_attention_that_looks_ahead_is_refused():
    """There is no next token without a direction."""
    lm = model("turned halves")
    cache = used_cache(lm, 2)
    lm.backbone.layers[1].mixer.causal = False
    assert native_refusal(lm, tokens(2), cache) == "attention must be causal"


def test_in_place_is_refused_with_the_remedy():
    """Keys and values grow, so the memory of the given cache cannot hold them."""
    lm = model("turned halves")
    with pytest.raises(BackendError, match="advance, which seldom makes one"):
        lm.step_(tokens(2), used_cache(lm, 2))
