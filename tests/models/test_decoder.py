"""Laws of the native decoder: it computes what the modules compute, in every option and format."""

import pytest
import torch

from anymamba.generate import generate
from anymamba.models import quantize_lm
from anymamba.nn import ModelCache
from decoder_cases import (
    BYTES,
    MODELS,
    PAIRS,
    assert_near_states,
    clearest,
    model,
    round_activations,
    round_inputs,
    tokens,
    used_cache,
)
from kernels import DECODERS, running
from laws import TOLERANCE, assert_same, error_of

pytestmark = pytest.mark.skipif(not DECODERS, reason="no compiled kernels")
KINDS = pytest.mark.parametrize("kind", DECODERS)
HALVES = (torch.bfloat16, torch.float16)


@KINDS
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_decoder_equals_modules(name, rows, kind):
    """Logits and every field of the state are those of the modules, token after token."""
    lm = model(name)
    want, got = used_cache(lm, rows), used_cache(lm, rows)
    with running(kind), torch.no_grad():
        for ids_b in tokens(4, rows):
            expected, want = lm.step(ids_b, want, impl="portable")
            assert_same(expected, lm.step_(ids_b, got, impl="native"))
    assert_near_states(want, got, TOLERANCE[torch.float32, "value"])


@KINDS
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", MODELS)
def test_half_types_equal_the_wide_model(name, dtype, kind):
    """Half weights give the logits of the same numbers in float32: only the state is rounded.

    And where the CPU multiplies bfloat16, what meets a matrix of bfloat16.
    """
    lm = model(name, dtype)
    wide = model(name)
    wide.load_state_dict(lm.state_dict())
    cache = used_cache(lm, 2)
    want = cache.to(torch.float32)
    if dtype == torch.bfloat16 and kind in PAIRS:
        round_inputs(wide, dtype)
    with running(kind), torch.no_grad():
        for ids_b in tokens(4, 2):
            expected, want = wide.step(ids_b, want, impl="portable")
            logits_bw = lm.step_(ids_b, cache, impl="native")
    assert logits_bw.dtype == dtype
    # Windows, keys and values of the past are halves.
    assert_same(expected.to(dtype), logits_bw)


@pytest.mark.skipif(not set(PAIRS) & set(DECODERS), reason="no products of bfloat16 here")
@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3"])
def test_rounded_activations_cost_less_than_a_module_of_bfloat16(name):
    """The decoder rounds what meets a matrix; modules of bfloat16 round everything."""
    lm = model(name, torch.bfloat16, d_model=72)
    wide = model(name, d_model=72)
    wide.load_state_dict(lm.state_dict())
    cache, ids_b = used_cache(lm, 8), tokens(8)
    with running(PAIRS[0]), torch.no_grad():
        exact = wide.step(ids_b, cache.to(torch.float32), impl="portable").logits
        module = lm.step(ids_b, cache, impl="portable").logits
        decoded = lm.step_(ids_b, cache, impl="native")
    assert (decoded - exact).norm() <= (module - exact).norm()


@KINDS
@pytest.mark.parametrize("rows", [1, 3, 6])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("name", ["mamba1", "mamba2 around", "mamba3 rank 4 normed"])
def test_integers_equal_their_dequantised_weights(name, scheme, rows, kind, monkeypatch):
    """A quantised model decodes as the modules do with the weights that it stands for.

    The modules are given activations that are rounded in the same blocks.
    """
    # A head of 49 rows leaves one behind groups of 8 and 16.
    sizes = {"d_model": 48, "vocab_size": 49, "pad_vocab_size_multiple": 1}
    lm = quantize_lm(model(name, **sizes), scheme)
    want, ids_nb, logits_nbw, margins = used_cache(lm, 64), tokens(4, 64), [], []
    start = want.clone()
    left = round_activations(monkeypatch, scheme, kind, margins)
    with running(kind), torch.no_grad():
        for ids_b in ids_nb:
            logits_bw, want = lm.step(ids_b, want, impl="portable")
            logits_nbw.append(logits_bw)
        chosen = clearest(margins, rows)
        got = start.rows(chosen).clone()
        for ids_b, logits_bw in zip(ids_nb, logits_nbw, strict=True):
            actual = lm.step_(ids_b[chosen], got, impl="native")
            assert error_of(logits_bw[chosen], actual) <= left
    assert_near_states(want.rows(chosen), got, left)


@KINDS
@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3"])
def test_what_rounded_activations_cost_beside_rounded_weights(name, scheme, kind):
    """Integers for activations lose little beside what integers for weights lost.

    7 bits beside weights of 4 lose a sixteenth; with a scale for 128 of them half as much again,
    because the largest of 128 is larger than that of 32. Bytes beside bytes lose what those do, and
    a little more: activations have longer tails. 384 and 768 columns are several of either. In six
    seeds the shares were up to 0.08, 0.122, 1.29 and 0.0052.
    """
    if scheme == "int4":
        share = 0.15 if kind in BYTES else 0.1
    else:
        share = 1.5 if kind in BYTES else 0.01
    sizes = {"d_model": 384, "noise": 0.02}
    plain, lm = model(name, **sizes), quantize_lm(model(name, **sizes), scheme)
    ids_b, cache = tokens(8), used_cache(lm, 8)
    with running(kind), torch.no_grad():
        exact = plain.step(ids_b, cache, impl="portable").logits
        quantized = lm.step(ids_b, cache, impl="portable").logits
        decoded = lm.step_(ids_b, cache, impl="native")
    assert (decoded - quantized).norm() <= share * (quantized - exact).norm()


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3", "mamba3 quaternion"])
def test_greedy_tokens_are_those_of_the_modules(name):
    """Ragged prompts continue with the same tokens whether the decoder runs or not."""
    lm = model(name)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    with running("portable"):
        want = generate(lm, prompts, max_new_tokens=24)
    assert generate(lm, prompts, max_new_tokens=24) == want


@KINDS
@pytest.mark.parametrize("form", ["float32", "int8", "int4"])
def test_rows_do_not_know_each_other(form, kind):
    """A row among others has the bits of that row alone, logits and state."""
    lm = model("mamba3", d_model=48)
    if form != "float32":
        quantize_lm(lm, form)
    together = used_cache(lm, 6)
    ids_b = tokens(6)
    alone = [together.rows([row]) for row in range(6)]
    with running(kind):
        logits_bw = lm.step_(ids_b, together, impl="native")
        for row, cache in enumerate(alone):
            assert torch.equal(lm.step_(ids_b[[row]], cache, impl="native")[0], logits_bw[row])
    for name, tensor in ModelCache.join(alone).to_tensors().items():
        assert torch.equal(tensor, together.to_tensors()[name]), name


@KINDS
@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_any_number_of_rows(form, kind):
    """However many rows share the weights, whatever the sizes, each has the bits it has alone."""
    dtype = getattr(torch, form) if form.endswith(("32", "16")) else torch.float32
    # 72 and 144 columns are whole in no format; 37 rows of the head fill no group of rows.
    lm = model("mamba1", dtype, d_model=72)
    if form.startswith("int"):
        quantize_lm(lm, form)
    start, ids_b = used_cache(lm, 64), tokens(64)
    with running(kind):
        alone = [
            lm.step_(ids_b[[row]], start.rows([row]).clone(), impl="native")[0] for row in range(64)
        ]
        for rows in (2, 3, 4, 5, 7, 8, 9, 17, 64):
            cache = start.rows(list(range(rows))).clone()
            logits_bw = lm.step_(ids_b[:rows], cache, impl="native")
            assert torch.equal(logits_bw, torch.stack(alone[:rows])), rows


@pytest.fixture
def threads():
    """Set torch's number of threads, and set it back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mamba1", {}),
        ("mamba1", {"vocab_size": 2000, "d_intermediate": 400}),
        ("mamba2 around", {}),
        ("mamba3 rank 4 normed", {}),
        ("mamba3 rank 4 normed", {"vocab_size": 2000, "d_intermediate": 400}),
    ],
    ids=lambda value: value if isinstance(value, str) else "large" if value else "small",
)
def test_threads_change_no_bit(name, sizes, form, threads):
    """Logits and states are the same bits on 1, 2 and 5 threads, however work is shared out."""
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    lm = model(name, dtype, **{"d_model": 48, **sizes})
    if form == "int4":
        quantize_lm(lm, form)
    start, ids_b, results = used_cache(lm, 3), tokens(3), []
    for count in (1, 2, 5):
        threads(count)
        cache = start.clone()
        results.append({"logits": lm.step_(ids_b, cache, impl="native"), **cache.to_tensors()})
    for other in results[1:]:
        for name, tensor in results[0].items():
            assert torch.equal(tensor, other[name]), name


def test_states_may_be_views():
    """Rows that lie apart in a larger cache are advanced where they are, and only they."""
    lm = model("mamba2")
    large = used_cache(lm, 5)
    before, ids_b = large.clone(), tokens(2)
    view = large.map(lambda x: x[1:5:2])
    want = lm.step_(ids_b, copy := view.clone(), impl="native")
    assert torch.equal(lm.step_(ids_b, view, impl="native"), want)
    for name, tensor in large.to_tensors().items():
        assert torch.equal(tensor[1:5:2], copy.to_tensors()[name]), name
        assert torch.equal(tensor[::2], before.to_tensors()[name][::2]), name


@KINDS
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_not_a_number_stays_in_its_row(value, form, kind):
    """NaN and infinity in one row's state reach its logits and no other row."""
    lm = model("mamba2", torch.bfloat16 if form == "bfloat16" else torch.float32)
    if form.startswith("int"):
        quantize_lm(lm, form)
    cache = used_cache(lm, 3)
    before = cache.clone()
    cache.layers[0].ssm_bhpr[1] = value
    with running(kind):
        clean = lm.step_(tokens(3), before, impl="native")
        logits_bw = lm.step_(tokens(3), cache, impl="native")
    assert logits_bw[1].isnan().any()
    assert torch.equal(logits_bw[::2], clean[::2])


def test_a_state_goes_on_anywhere():
    """A state taken out of the decoder is a value: forked, trained through, and read by modules."""
    lm = model("mamba3")
    cache = used_cache(lm, 2)
    lm.step_(tokens(2), cache, impl="native")
    fork = cache.clone()
    lm.step_(tokens(2, seed=3), cache, impl="native")
    assert torch.equal(fork.position_b + 1, cache.position_b)
    leaf = fork.requires_grad_()
    loss = lm.prefill(tokens(2, 3), leaf, impl="portable").logits.sum()
    loss.backward()
    assert leaf.layers[0].ssm_bhpr.grad.abs().sum() > 0


def test_step_leaves_its_cache_alone():
    """`step` without gradients runs the decoder on a copy; with gradients, the modules."""
    lm = model("mamba2")
    cache = used_cache(lm, 2)
    before = cache.clone()
    with torch.no_grad():
        logits_bw, new = lm.step(tokens(2), cache)
    for name, tensor in cache.to_tensors().items():
        assert torch.equal(tensor, before.to_tensors()[name]), name
    assert torch.equal(lm.step_(tokens(2), cache, impl="native"), logits_bw)
    for name, tensor in cache.to_tensors().items():
        assert torch.equal(tensor, new.to_tensors()[name]), name
    lm.requires_grad_()
    assert lm.step(tokens(2), before).logits.requires_grad


@pytest.mark.slow
def test_latency_is_flat():
    """A late token costs what an early one did."""
    import statistics
    import time

    lm = model("mamba3")
    cache = used_cache(lm, 1)
    seconds = []
    for _ in range(6000):
        start = time.perf_counter()
        lm.step_(torch.tensor([1]), cache, impl="native")
        seconds.append(time.perf_counter() - start)
    early, late = (statistics.median(part) for part in (seconds[100:1100], seconds[-1000:]))
    assert late <= 1.5 * early
    assert int(cache.position_b[0]) == 6005
