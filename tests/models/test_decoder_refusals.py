"""What the decoder leaves to the modules, and how it refuses: it bypasses nothing."""

import gc
import logging
import weakref
from pkgutil import resolve_name

import pytest
import torch
from torch import nn

from anymamba.errors import BackendError, CacheError, ConfigError, ShapeError
from anymamba.models import MambaConfig, MambaLM, native_refusal, quantize_lm
from anymamba.nn import VirtualLayers
from anymamba.settings import override
from decoder_cases import assert_current, merge_lora, model, run_once, tokens, used_cache
from kernels import NATIVE
from laws import assert_same

pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiled kernels")


def hook(lm: MambaLM, path: str) -> list[int]:
    calls: list[int] = []
    lm.get_submodule(path).register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize(
    "path",
    [
        "backbone.embedding",
        "backbone.layers.0",
        "backbone.layers.1.mixer.in_proj",
        "backbone.layers.1.mixer.out_proj",
        "backbone.layers.0.mlp",
        "backbone.layers.0.mlp.fc1",
        "lm_head",
    ],
)
def test_hooks_are_called(path):
    """A hook that comes after the first token makes `auto` call modules and `native` refuse."""
    lm = run_once(model("mamba3"))
    calls = hook(lm, path)
    cache = used_cache(lm, 2)
    calls.clear()
    lm.step_(tokens(2), cache)
    assert calls == [1]
    with pytest.raises(BackendError, match="without hooks"):
        lm.step_(tokens(2), cache, impl="native")
    lm.get_submodule(path)._forward_hooks.clear()
    assert_current(lm)


class Doubled(nn.Linear):
    """A projection that is not what its weight says."""

    def forward(self, input):
        return 2 * super().forward(input)


def swap_projection(lm: MambaLM) -> None:
    mixer = lm.backbone.layers[0].mixer
    mixer.out_proj = Doubled(mixer.d_inner, 12, bias=False)


def parametrize(lm: MambaLM) -> None:
    torch.nn.utils.parametrizations.weight_norm(lm.backbone.layers[0].mixer.in_proj)


def replace_forward(lm: MambaLM) -> None:
    linear = lm.backbone.layers[0].mixer.in_proj
    original = linear.forward
    linear.forward = lambda x: 2 * original(x)


def global_hook(lm: MambaLM) -> None:
    nn.modules.module._global_forward_hooks[0] = lambda *_: None


@pytest.mark.parametrize("change", [swap_projection, parametrize, replace_forward, global_hook])
def test_what_is_no_plain_layer_is_called(change):
    """A swapped, parametrised or rebound layer is never replaced by its weight."""
    lm = run_once(model("mamba2"))
    change(lm)
    try:
        cache, ids_b = used_cache(lm, 2), tokens(2)
        with torch.no_grad():
            want = lm.step(ids_b, cache, impl="portable").logits
        with pytest.raises(BackendError, match="impl='native' cannot serve"):
            lm.step_(ids_b, cache, impl="native")
        assert torch.equal(lm.step_(ids_b, cache), want)
    finally:
        nn.modules.module._global_forward_hooks.clear()


def test_virtual_layers_run_as_modules():
    """They decode through their modules, and `native` says why."""
    lm = MambaLM(MambaConfig(d_model=12, n_layer=2, vocab_size=37, virtual=VirtualLayers(4)))
    cache, ids_b = used_cache(lm, 2), tokens(2)
    with torch.no_grad():
        want = lm.step(ids_b, cache, impl="portable").logits
        assert torch.equal(lm.step(ids_b, cache).logits, want)
        with pytest.raises(BackendError, match="share weights"):
            lm.step(ids_b, cache, impl="native")


GATED_NORMS = {
    "groups of two heads": ("group_size", 12),
    "one group": ("group_size", None),
    "the gate first": ("norm_before_gate", False),
}


@pytest.mark.parametrize("name", ["mamba3 whole softplus", "mamba3 rank 4 normed"])
@pytest.mark.parametrize("change", GATED_NORMS)
def test_other_gated_norms_of_mamba3_run_as_modules(change, name):
    """The kernel norms each head before its gate; what is asked to do otherwise is not forced."""
    lm = run_once(model(name))
    setattr(lm.backbone.layers[1].mixer.norm, *GATED_NORMS[change])
    cache, ids_b = used_cache(lm, 2), tokens(2)
    with torch.no_grad():
        want = lm.step(ids_b, cache, impl="portable").logits
    with pytest.raises(BackendError, match="the gated norm of Mamba3 must have group"):
        lm.step_(ids_b, cache.clone(), impl="native")
    assert torch.equal(lm.step_(ids_b, cache), want)


def test_a_gated_norm_whose_groups_do_not_fit_is_refused():
    """The kernel walks from group to group, and a last one would reach behind the channels."""
    lm = run_once(model("mamba2"))
    cache = used_cache(lm, 2)
    lm.backbone.layers[0].mixer.norm.group_size = 7
    with pytest.raises(BackendError, match="group_size of RMSNormGated must divide 24"):
        lm.step_(tokens(2), cache, impl="native")
    with pytest.raises(ConfigError, match="group_size"):
        lm.step_(tokens(2), cache)


def test_float64_runs_as_modules():
    """The decoder computes in float32 and lowers nobody's precision."""
    lm = model("mamba1").double()
    with pytest.raises(BackendError, match="float64"):
        lm.step_(tokens(2), used_cache(lm, 2), impl="native")
    assert lm.step_(tokens(2), used_cache(lm, 2)).dtype == torch.float64


def test_guards_and_autocast_run_as_modules():
    """Both look inside the blocks or change what they compute."""
    lm = model("mamba1")
    cache = used_cache(lm, 2)
    with override(deny_nan=True):
        assert "guards" in (native_refusal(lm, tokens(2), cache) or "")
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in (native_refusal(lm, tokens(2), cache) or "")
    assert native_refusal(lm, tokens(2), cache) is None


@pytest.mark.parametrize(
    ("name", "parameter"), [("mamba1", "mixer.dt_proj.weight"), ("mamba2", "mixer.A_log")]
)
def test_a_model_made_in_inference_mode_runs_as_modules(name, parameter):
    """Its copies could not be trusted; `native` says which parameter, and what to do about it."""
    with torch.inference_mode():
        lm = model(name)
        cache, ids_b = used_cache(lm, 2), tokens(2)
        want = lm.step(ids_b, cache, impl="portable").logits
        with pytest.raises(BackendError) as caught:
            lm.step_(ids_b, cache, impl="native")
        assert torch.equal(lm.step_(ids_b, cache), want)
    assert f"backbone.layers.0.{parameter} was made in inference mode" in str(caught.value)
    assert "Make or load the model outside of torch.inference_mode()" in str(caught.value)


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3"])
def test_a_model_made_outside_decodes_in_inference_mode(name):
    """Compiled inside or outside, it serves both."""
    lm = model(name)
    ids_b, cache = tokens(2), used_cache(lm, 2)
    with torch.inference_mode():
        inside = lm.step_(ids_b, cache.clone(), impl="native")
    assert torch.equal(inside, lm.step_(ids_b, cache.clone(), impl="native"))
    merge_lora(lm)
    assert_current(lm)


MISTAKES = {
    "an id outside": lambda lm, cache: (torch.tensor([1, 40]), cache, ConfigError),
    "a negative id": lambda lm, cache: (torch.tensor([-1, 0]), cache, ConfigError),
    "too few ids": lambda lm, cache: (tokens(1), cache, CacheError),
    "too few layers": lambda lm, cache: (
        tokens(2),
        cache._replace(layers=cache.layers[:1]),
        CacheError,
    ),
    "a foreign state": lambda lm, cache: (tokens(2), used_cache(model("mamba1"), 2), CacheError),
    "a narrow state": lambda lm, cache: (
        tokens(2),
        cache._replace(layers=(cache.layers[0], cache.layers[1].rows([0]))),
        CacheError,
    ),
    "no such impl": lambda lm, cache: (tokens(2), cache, ConfigError),
}


@pytest.mark.parametrize("impl", ["auto", "native", "portable"])
@pytest.mark.parametrize("verb", ["step", "step_", "advance"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_refused_token_leaves_the_state(mistake, verb, impl):
    """Everything is checked before anything is written, and every way names the same mistake."""
    lm = model("mamba2")
    cache = used_cache(lm, 2)
    ids_b, given, error = MISTAKES[mistake](lm, cache)
    before = given.clone()
    with pytest.raises(error) as caught, torch.no_grad():
        getattr(lm, verb)(ids_b, given, impl="fast" if mistake == "no such impl" else impl)
    assert "impl='auto' or" not in str(caught.value)
    for name, tensor in given.to_tensors().items():
        assert torch.equal(tensor, before.to_tensors()[name]), name


@pytest.mark.parametrize("impl", ["auto", "native", "portable"])
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_a_wrong_id_is_named(scheme, impl):
    """The message says which row, which id, and which ids there are."""
    lm = model("mamba2")
    if scheme is not None:
        quantize_lm(lm, scheme)
    with pytest.raises(ConfigError, match=r"must lie in 0\.\.39; row 1 has 40\. Use the tokenizer"):
        lm.step_(torch.tensor([1, 40]), used_cache(lm, 2), impl=impl)


def test_a_token_is_mapped():
    """Inside of vmap modules run: a mapped tensor has no memory of its own."""
    lm = model("mamba2")
    cache, ids_nb = used_cache(lm, 2), tokens(3, 2)
    with torch.no_grad():
        want = torch.stack([lm.step(ids_b, cache, impl="portable").logits for ids_b in ids_nb])
        assert_same(want, torch.vmap(lambda ids_b: lm.step(ids_b, cache).logits)(ids_nb))


def test_the_choice_is_logged_once(caplog):
    """The log says which way a model decodes, and why, one time."""
    lm = model("mamba2")
    with caplog.at_level(logging.INFO, "anymamba.models"):
        for _ in range(3):
            run_once(lm)
            lm.backbone.layers[0].mixer.in_proj.register_forward_hook(lambda *_: None)
            lm.step_(tokens(2), used_cache(lm, 2))
            lm.backbone.layers[0].mixer.in_proj._forward_hooks.clear()
    assert [record.message for record in caplog.records] == [
        "MambaLM.step_: native decoder",
        "MambaLM.step_: modules (backbone.layers.0.mixer.in_proj must be a Linear or "
        "QuantizedLinear without hooks, and is a Linear, swapped or hooked)",
    ]


@pytest.mark.parametrize("verb", ["step", "step_", "advance", "advance_state"])
def test_every_verb_logs_why_modules_run(verb, caplog):
    """Whoever decodes slowly finds the reason, whichever method was called."""
    lm = model("mamba2")
    hook(lm, "lm_head")
    with caplog.at_level(logging.INFO, "anymamba.models"), torch.no_grad():
        getattr(lm, verb)(tokens(2), used_cache(lm, 2))
    assert [record.message for record in caplog.records] == [
        "MambaLM.step_: modules (lm_head must be a Linear or QuantizedLinear without hooks, and is "
        "a Linear, swapped or hooked)"
    ]


@pytest.mark.parametrize("path", ["backbone.layers.1.mixer.in_proj", "lm_head"])
def test_a_refusal_is_found_once(path, monkeypatch):
    """Modules do not compile the model in vain at every token, and it is served again later."""
    lm = run_once(model("mamba2"))
    cache, compiled = used_cache(lm, 2), []
    where = "anymamba.models.decoder.known.Decoder"
    plain = resolve_name(where)
    monkeypatch.setattr(where, lambda *of: compiled.append(1) or plain(*of))
    hook(lm, path)
    for _ in range(3):
        lm.step_(tokens(2), cache)
    assert compiled == [1]
    lm.get_submodule(path)._forward_hooks.clear()
    assert_current(lm)
    assert compiled == [1, 1]


def test_a_refused_model_is_not_kept_alive():
    """What is remembered of a refusal does not hold the model."""
    lm = model("mamba2")
    hook(lm, "lm_head")
    lm.step_(tokens(2), used_cache(lm, 2))
    gone = weakref.ref(lm)
    del lm
    gc.collect()
    assert gone() is None


class Louder(MambaLM):
    """A model that runs tokens in its own way."""

    def step(self, ids_b, cache, *, impl="auto"):
        logits_bw, cache = super().step(ids_b, cache, impl="portable")
        return type(super().step(ids_b, cache, impl="portable"))(2 * logits_bw, cache)


def test_the_step_of_a_subclass_is_called():
    """The decoder takes no token away from a class that has its own rule."""
    plain, lm = model("mamba2"), model("mamba2")
    lm.__class__ = Louder
    cache, ids_b = used_cache(plain, 2), tokens(2)
    with torch.no_grad():
        want = 2 * plain.step(ids_b, cache, impl="portable").logits
    assert torch.equal(lm.step_(ids_b, cache.clone()), want)
    assert torch.equal(lm.advance(ids_b, cache.clone()).logits, want)
    assert int(lm.advance_state(ids_b, cache).position_b[0]) == 6
    with pytest.raises(BackendError, match="Louder has a method step of its own"):
        lm.step_(ids_b, cache, impl="native")


def test_states_of_inference_mode_are_written_inside_it():
    """The decoder refuses where modules do, and `advance` returns an ordinary state."""
    lm, ids_b = model("mamba2"), tokens(2)
    with torch.inference_mode():
        cache = lm.prefill(tokens(2, 5, seed=2)).cache
        want = lm.step_(ids_b, cache.clone(), impl="native")
    with pytest.raises(BackendError, match="made in inference mode are written to only inside it"):
        lm.step_(ids_b, cache, impl="native")
    with pytest.raises(CacheError, match="Clone the cache first"):
        lm.step_(ids_b, cache)
    logits_bw, after = lm.advance(ids_b, cache)
    assert_same(want, logits_bw)
    assert not after.position_b.is_inference()
    assert_same(want, lm.step_(ids_b, cache.clone(), impl="native"))


def test_logits_land_where_the_caller_said():
    """The decoder writes the logits into given memory; modules, which return all, do not."""
    lm, landing_bw = model("mamba2"), torch.zeros(3, model("mamba2").config.padded_vocab_size)
    for impl in ("portable", "native"):
        assert not landing_bw.any()
        logits_bw, _ = lm.advance(tokens(3), used_cache(lm, 3), impl=impl, landing_bw=landing_bw)
    assert torch.equal(landing_bw, logits_bw)


@pytest.mark.parametrize("wrong", [torch.empty(2, 8), torch.empty(3, 1, dtype=torch.float64)])
def test_rejects_a_landing_that_does_not_fit(wrong):
    """The kernel writes into it: another shape or dtype would write elsewhere."""
    lm = model("mamba2")
    with pytest.raises(ShapeError, match="landing_bw must be contiguous"):
        lm.advance(tokens(3), used_cache(lm, 3), impl="native", landing_bw=wrong)
