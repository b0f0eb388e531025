"""The decoder is never stale and bypasses nothing: whatever changes in a model, it notices."""

import copy
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from anymamba.errors import BackendError, CacheError, ConfigError, ShapeError
from anymamba.generate import generate, generate_detailed, stream
from anymamba.models import MambaConfig, MambaLM, native_refusal, quantize_lm
from anymamba.nn import ModelCache, VirtualLayers
from anymamba.settings import override
from decoder_cases import model, tokens, used_cache
from kernels import NATIVE
from laws import assert_same

pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiled kernels")


def assert_current(lm: MambaLM) -> None:
    """Assert that the decoder computes with the weights that the model has now.

    No prompt is read, after which the decoder would look more closely.
    """
    ids_b = tokens(2)
    with torch.no_grad():
        cache = lm.step(ids_b, lm.empty_cache(2), impl="portable").cache
        want = lm.step(ids_b, cache, impl="portable").logits
    assert_same(want, lm.step_(ids_b, cache, impl="native"))


def run_once(lm: MambaLM) -> MambaLM:
    lm.step_(tokens(2), used_cache(lm, 2), impl="native")
    return lm


def train(lm: MambaLM, *, fused: bool = False) -> None:
    lm.requires_grad_()
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.5, fused=fused)
    lm.loss(tokens(2, 6), impl="portable").backward()
    optimizer.step()


def merge_lora(lm: MambaLM) -> None:
    weight = lm.backbone.layers[1].mixer.in_proj.weight
    with torch.no_grad():
        weight += torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1])


def merge_step_sizes(lm: MambaLM) -> None:
    weight = lm.backbone.layers[1].mixer.dt_proj.weight
    with torch.no_grad():
        weight += torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1])


def other_values(lm: MambaLM) -> dict[str, torch.Tensor]:
    return {name: value * 1.5 + 0.01 for name, value in lm.state_dict().items()}


def swap_data(lm: MambaLM) -> None:
    for parameter in lm.parameters():
        parameter.data = parameter.data * 1.2


def other_model() -> MambaLM:
    lm = model("mamba2")
    lm.load_state_dict(other_values(lm))
    return lm


CHANGES = {
    "training": train,
    "load_state_dict": lambda lm: lm.load_state_dict(other_values(lm)),
    "load_state_dict assigned": lambda lm: lm.load_state_dict(other_values(lm), assign=True),
    "a merged adapter": merge_lora,
    "new memory": swap_data,
    "another layer": lambda lm: setattr(
        lm.backbone.layers[0], "mixer", model("mamba2", n_layer=1).backbone.layers[0].mixer
    ),
    "another head": lambda lm: setattr(lm, "lm_head", nn.Linear(12, 40, bias=False)),
    "another backbone": lambda lm: setattr(lm, "backbone", other_model().backbone),
    "other layers": lambda lm: setattr(lm.backbone, "layers", other_model().backbone.layers),
    "another eps": lambda lm: setattr(lm.backbone.norm_f, "eps", 0.5),
    "another clamp": lambda lm: setattr(lm.backbone.layers[0].mixer, "dt_limit", (0.5, 0.6)),
    "values that nobody counts": lambda lm: lm.backbone.norm_f.weight.data.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_decodes_with_its_new_weights(change):
    """After training, loading, merging, moving or swapping, no old number is used."""
    lm = run_once(model("mamba2"))
    CHANGES[change](lm)
    assert_current(lm)


def merge_through_data(lm: MambaLM) -> None:
    """Write as adapters are merged: identity, address and version stay what they were."""
    for parameter in lm.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)


def after_a_prompt(lm: MambaLM, cache: ModelCache) -> torch.Tensor:
    lm.prefill(tokens(1, 3))
    return lm.step_(tokens(2), cache, impl="native")


def under_a_promise(lm: MambaLM, cache: ModelCache) -> torch.Tensor:
    with lm.unchanged():
        return lm.step_(tokens(2), cache, impl="native")


def generated(lm: MambaLM, cache: ModelCache, **options) -> torch.Tensor:
    options |= {"max_new_tokens": 5, "cache": cache, "logprobs": True}
    return torch.tensor(generate_detailed(lm, tokens(2, 1), **options).logprobs)


def generated_with_functions(lm: MambaLM, cache: ModelCache) -> torch.Tensor:
    return generated(lm, cache, stop=lambda ids: False)


def streamed(lm: MambaLM, cache: ModelCache) -> torch.Tensor:
    found = stream(lm, [1], max_new_tokens=5, cache=cache.rows([0]), logprobs=True)
    return torch.tensor([(token, *found.logprobs[-1:]) for token in found])


@pytest.mark.parametrize(
    "run",
    [after_a_prompt, under_a_promise, generated, generated_with_functions, streamed],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("mamba1", torch.float32),
        ("mamba1", torch.bfloat16),
        ("mamba2", torch.float16),
        ("mamba3 rank 2", torch.bfloat16),
    ],
)
def test_a_merge_that_nobody_counts_is_noticed_where_work_begins(name, dtype, run):
    """Copies of parameters that were written to through `.data` are made anew."""
    lm = model(name, dtype)
    cache = used_cache(lm, 2)
    run_once(lm)
    merge_through_data(lm)
    want = run(copy.deepcopy(lm), cache.clone())
    assert torch.equal(want, run(lm, cache.clone()))


def test_copies_of_not_a_number_are_kept(monkeypatch):
    """They are compared by their bits: what is no number equals itself."""
    lm = model("mamba1", torch.bfloat16)
    lm.backbone.layers[0].mixer.A_log[0] = torch.nan
    run_once(lm)
    monkeypatch.setattr("anymamba.models.decoder.decoder._Decoder", None)
    after_a_prompt(lm, lm.empty_cache(2))


ROTATIONS = {"range": 0.25, "pairing": "half_split", "width": 0}


@pytest.mark.parametrize("name", ROTATIONS)
def test_a_changed_rotation_is_noticed(name):
    """It is no module, but its attributes are numbers of the program like those of modules."""
    lm = run_once(model("mamba3"))
    setattr(lm.backbone.layers[0].mixer.rotation, name, ROTATIONS[name])
    assert_current(lm)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mamba3", {"angles": 9}),
        ("mamba3", {"kind": "quaternion"}),
        ("mamba3 quaternion", {"blocks": 9}),
    ],
)
def test_a_rotation_of_other_sizes_is_refused(name, change):
    """The kernel reads as many channels as the rotation says, so they must be there."""
    lm = run_once(model(name))
    for mixer in (layer.mixer for layer in lm.backbone.layers):
        vars(mixer.rotation).update(change)
    with pytest.raises(BackendError, match="channels of the rotation"):
        lm.step_(tokens(2), lm.empty_cache(2), impl="native")


@pytest.mark.parametrize(
    ("name", "flag"), [("mamba2", "rmsnorm"), ("mamba3 whole softplus", "is_outproj_norm")]
)
def test_a_norm_that_is_left_out_is_noticed(name, flag):
    """The modules ask at every token, and so must the decoder."""
    lm = run_once(model(name))
    setattr(lm.backbone.layers[0].mixer, flag, False)
    assert_current(lm)


def test_an_adapter_merged_into_step_sizes_is_noticed():
    """The weight of Mamba-1's step sizes is laid out anew, and its copy follows at once."""
    lm = run_once(model("mamba1"))
    merge_step_sizes(lm)
    assert_current(lm)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3 rank 2"])
def test_training_reaches_every_copy(name, fused):
    """Every parameter moves in a step of training, and every copy of one follows.

    A fused optimiser does not raise the version of what it writes to.
    """
    lm = run_once(model(name))
    train(lm, fused=fused)
    assert_current(lm)


def test_a_transposed_weight_is_noticed():
    """A square weight that is turned in its place is no longer the one that was compiled."""
    lm = run_once(model("mamba2", ssm_cfg={"layer": "Mamba2", "headdim": 4, "expand": 1}))
    weight = lm.backbone.layers[0].mixer.out_proj.weight
    weight.data = weight.data.t()
    cache, ids_b = used_cache(lm, 2), tokens(2)
    want = lm.step(ids_b, cache, impl="portable").logits
    assert_same(want, lm.step_(ids_b, cache))


def shorten(owner, name: str) -> None:
    parameter = getattr(owner, name)
    setattr(owner, name, nn.Parameter(parameter.detach()[:-1].clone()))


WRONG_SHAPES = {
    "embedding": lambda lm: setattr(lm.backbone, "embedding", nn.Embedding(40, 11)),
    "head": lambda lm: setattr(lm, "lm_head", nn.Linear(11, 40, bias=False)),
    "norm_f": lambda lm: shorten(lm.backbone.norm_f, "weight"),
    "norm": lambda lm: shorten(lm.backbone.layers[0].norm, "weight"),
    "in_proj": lambda lm: setattr(lm.backbone.layers[0].mixer, "in_proj", nn.Linear(12, 10)),
    "bias": lambda lm: setattr(
        lm.backbone.layers[0].mixer.out_proj, "bias", nn.Parameter(torch.ones(3))
    ),
    "out_proj": lambda lm: setattr(lm.backbone.layers[0].mixer, "out_proj", nn.Linear(10, 12)),
    "convolution": lambda lm: shorten(lm.backbone.layers[0].mixer.conv1d, "weight"),
    "D": lambda lm: shorten(lm.backbone.layers[0].mixer, "D"),
    "no D": lambda lm: setattr(lm.backbone.layers[0].mixer, "D", None),
    "dt_bias": lambda lm: shorten(lm.backbone.layers[0].mixer, "dt_bias"),
    "A_log": lambda lm: shorten(lm.backbone.layers[0].mixer, "A_log"),
}


@pytest.mark.parametrize("change", WRONG_SHAPES)
def test_weights_of_another_shape_are_refused(change):
    """The kernel reads as many numbers as the sizes say, so it must not start."""
    lm = run_once(model("mamba2"))
    cache = used_cache(lm, 2)
    WRONG_SHAPES[change](lm)
    with pytest.raises(BackendError, match=r"must have the shape|has no D"):
        lm.step_(tokens(2), cache, impl="native")


def test_another_default_device_changes_nothing():
    """Where torch makes tensors by default is no concern of a token on the CPU."""
    lm = model("mamba2")
    cache, ids_b = used_cache(lm, 2), tokens(2)
    want = lm.step_(ids_b, cache.clone(), impl="native")
    written = generate(lm, [[1, 2]], max_new_tokens=5, temperature=1.0)
    with torch.device("meta"):
        assert_same(want, lm.step_(ids_b, cache, impl="native"))
        assert generate(lm, [[1, 2]], max_new_tokens=5, temperature=1.0) == written


def test_copies_of_a_model_stand_alone():
    """A deep copy and a pickled model carry no address of the original."""
    lm = run_once(model("mamba1"))
    for other in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm))):
        train(other)
        assert_current(other)
    assert_current(lm)


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


ATTENTION = {"causal": True, "num_heads": 2, "num_heads_kv": 1, "rotary_emb_dim": 2}
OTHERS = {
    "attention": ({"attn_layer_idx": [1], "attn_cfg": ATTENTION}, "MHA"),
    "virtual layers": ({"virtual": VirtualLayers(4)}, "share weights"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_stacks_run_as_modules(name):
    """Attention and virtual layers decode through their modules, and `native` says why."""
    options, reason = OTHERS[name]
    lm = MambaLM(MambaConfig(d_model=12, n_layer=2, vocab_size=37, **options))
    cache, ids_b = used_cache(lm, 2), tokens(2)
    with torch.no_grad():
        want = lm.step(ids_b, cache, impl="portable").logits
        assert torch.equal(lm.step(ids_b, cache).logits, want)
        with pytest.raises(BackendError, match=reason):
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
        "MambaLM.step_: modules (in_proj of Mamba2 must be a Linear or QuantizedLinear without "
        "hooks, and is a Linear, swapped or hooked)",
    ]


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


@pytest.mark.parametrize("change", [swap_data, merge_lora, train], ids=lambda f: f.__name__)
def test_a_promise_ends_with_its_block(change):
    """Inside nobody looks, and old memory stays readable; outside a change is noticed again."""
    lm = run_once(model("mamba2"))
    cache, ids_b = used_cache(lm, 2), tokens(2)
    before = lm.step_(ids_b, cache.clone(), impl="native")
    with lm.unchanged(), lm.unchanged():
        lm.step_(ids_b, cache.clone(), impl="native")
        swap_data(lm)
        assert torch.equal(lm.step_(ids_b, cache.clone(), impl="native"), before)
    assert_current(lm)
    change(lm)
    assert_current(lm)


def test_a_promise_looks_at_its_first_token():
    """What changed before it was given is noticed."""
    lm = run_once(model("mamba2"))
    for _ in range(2):
        swap_data(lm)
        with lm.unchanged():
            assert_current(lm)
            assert_current(lm)


def test_a_promise_binds_one_thread():
    """What one thread promises, another has not: it may change the model and looks for itself."""
    lm = run_once(model("mamba2"))

    def load_and_look():
        lm.load_state_dict(other_values(lm))
        assert_current(lm)

    with ThreadPoolExecutor(1) as other, lm.unchanged():
        run_once(lm)
        other.submit(load_and_look).result()


def test_a_promise_may_end_in_another_thread():
    """Then it has ended in the one that gave it."""
    lm = run_once(model("mamba2"))
    promise = lm.unchanged()
    promise.__enter__()
    run_once(lm)
    with ThreadPoolExecutor(1) as other:
        other.submit(promise.__exit__, None, None, None).result()
    swap_data(lm)
    assert_current(lm)


def test_generation_promises_only_what_is_its_own():
    """A stop function may change the model, and the next token knows."""
    lm = model("mamba2")

    def stop(ids):
        if len(ids) == 2:
            swap_data(lm)
        return False

    before = copy.deepcopy(lm)
    found = generate(lm, [[1]], max_new_tokens=6, stop=stop)[0]
    lm = before
    with override(native="off"):
        assert generate(lm, [[1]], max_new_tokens=6, stop=stop)[0] == found


def test_a_promise_counts_looks(monkeypatch):
    """One look for a whole generation, one per token with a function of the caller's."""
    lm = run_once(model("mamba2"))
    looks = []
    monkeypatch.setattr(
        "anymamba.models.decoder.weights.Weights.are_current", lambda self: looks.append(1) or True
    )
    generate(lm, [[1, 2]], max_new_tokens=9)
    assert len(looks) == 1
    generate(lm, [[1, 2]], max_new_tokens=9, stop=lambda ids: False)
    assert len(looks) == 1 + 8
