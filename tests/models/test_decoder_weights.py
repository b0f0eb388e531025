"""The decoder is never stale: whatever changes in a model, it notices."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from anymamba.errors import BackendError, ConfigError
from anymamba.generate import generate, generate_detailed, stream
from anymamba.models import MambaLM, quantize_lm
from anymamba.nn import ModelCache
from anymamba.settings import override
from decoder_cases import assert_current, merge_lora, model, run_once, tokens, used_cache
from kernels import NATIVE
from laws import assert_same

pytestmark = pytest.mark.skipif(not NATIVE, reason="no compiled kernels")


def train(lm: MambaLM, *, fused: bool = False) -> None:
    lm.requires_grad_()
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.5, fused=fused)
    lm.loss(tokens(2, 6), impl="portable").backward()
    optimizer.step()


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
    compiled = []
    monkeypatch.setattr("anymamba.models.decoder.known.Decoder", compiled.append)
    after_a_prompt(lm, lm.empty_cache(2))
    assert compiled == []


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
    merge_lora(lm, "dt_proj")
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
    with pytest.raises(
        BackendError, match=r"must have the shape|there is no backbone\.layers\.0\.mixer\.D\."
    ):
        lm.step_(tokens(2), cache, impl="native")


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_a_vocabulary_cut_in_place_is_noticed(scheme):
    """The same memory, fewer rows of it: as many logits as modules give, and no id outside."""
    lm = model("mamba2")
    if scheme is not None:
        quantize_lm(lm, scheme)
    run_once(lm)
    embedding = lm.backbone.embedding
    if scheme is None:
        embedding.weight.data = embedding.weight.data[:16]
        embedding.num_embeddings = 16
    else:
        embedding.values.data, embedding.scales.data = embedding.values[:1], embedding.scales[:1]
        embedding.rows = embedding.num_embeddings = lm.lm_head.rows = 16
    cache, ids_b = lm.empty_cache(2), torch.tensor([3, 15])
    with torch.no_grad():
        want = lm.step(ids_b, cache, impl="portable").logits
    got = lm.step_(ids_b, cache, impl="native")
    assert want.shape == got.shape == (2, 16)
    for impl in ("native", "portable"):
        with pytest.raises(ConfigError, match=r"must lie in 0\.\.15"):
            lm.step_(torch.tensor([3, 16]), cache, impl=impl)


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
