"""Generation on the decoder: prompts' caches stay, failing callbacks leave whole tokens."""

import signal

import pytest
import torch
from torch import nn

from anymamba.errors import NonFiniteError
from anymamba.generate import generate, generate_detailed, keep_top_k, stream
from anymamba.models import quantize_lm
from decoder_cases import model, used_cache


@pytest.mark.parametrize("form", [None, "int8"])
def test_a_given_cache_is_not_changed(form):
    """The decoder writes into the generation's own state, never into the caller's."""
    lm = model("mamba3", d_model=48)
    if form is not None:
        quantize_lm(lm, form)
    cache = used_cache(lm, 1)
    before = cache.clone()
    output = generate_detailed(lm, [[1, 2]], max_new_tokens=5, cache=cache)
    for name, tensor in cache.to_tensors().items():
        assert torch.equal(tensor, before.to_tensors()[name]), name
    assert int(output.cache.position_b[0]) == 5 + 2 + 5


def test_rows_that_leave_touch_nobody():
    """Rows of different lengths end as they would alone."""
    lm = model("mamba2")
    prompts = [[1, 2, 3], [4], [5, 6], [7]]
    stops = [3, 11]
    together = generate(lm, prompts, max_new_tokens=16, stop_ids=stops)
    alone = [generate(lm, [prompt], max_new_tokens=16, stop_ids=stops)[0] for prompt in prompts]
    assert together == alone


@pytest.mark.parametrize("fails_at", [1, 2, 5, 8])
def test_a_failing_callback_leaves_a_whole_token(fails_at):
    """After an error in a stop function its token is not lost: the stream goes on with it."""
    lm = model("mamba2")
    failed = []

    def stop(ids):
        if len(ids) == fails_at and not failed:
            failed.append(1)
            raise KeyboardInterrupt
        return False

    how = {"max_new_tokens": 8, "frequency_penalty": 3.0, "repetition_penalty": 1.5}
    [want], [logprobs], _, _ = generate_detailed(lm, [[1, 2]], logprobs=True, **how)
    tokens_ = stream(lm, [1, 2], stop=stop, logprobs=True, **how)
    with pytest.raises(KeyboardInterrupt):
        list(tokens_)
    assert tokens_.ids == want[: fails_at - 1]
    assert tokens_.logprobs == logprobs[: fails_at - 1]
    assert int(tokens_.cache.position_b[0]) == 2 + fails_at - 1
    assert tokens_.finish_reason is None
    assert list(tokens_) == want[fails_at - 1 :]
    assert (tokens_.ids, tokens_.logprobs) == (want, logprobs)
    assert int(tokens_.cache.position_b[0]) == 2 + 8


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.5},
    ],
)
def test_refused_logits_leave_a_whole_token(options, bad):
    """Before anything is drawn the largest logit is looked at, so the stream can go on."""
    lm = model("mamba2")
    failed = []

    def spoil(ids, logits_w):
        if len(ids) == 3 and not failed:
            failed.append(1)
            logits_w[7 if bad > 0 or bad != bad else slice(None)] = bad
        return logits_w

    want = generate(lm, [[1, 2]], max_new_tokens=6, seed=5, **options)[0]
    tokens_ = stream(lm, [1, 2], max_new_tokens=6, seed=5, processors=spoil, **options)
    with pytest.raises(NonFiniteError, match="largest logit"):
        list(tokens_)
    assert tokens_.ids == want[:3]
    assert [*tokens_.ids, *tokens_] == want


@pytest.mark.parametrize("kind", ["no weight of its own", "more rows"])
def test_any_head_can_be_put_in(kind):
    """The same tokens come out of a wrapped head, and of one with rows beyond the vocabulary."""
    lm = model("mamba2")
    want = generate(lm, [[1, 2], [3]], max_new_tokens=8)
    head = nn.Linear(lm.lm_head.in_features, lm.lm_head.out_features + 8, bias=False)
    with torch.no_grad():
        head.weight[: lm.lm_head.out_features] = lm.lm_head.weight
    lm.lm_head = head if kind == "more rows" else nn.Sequential(lm.lm_head)
    assert generate(lm, [[1, 2], [3]], max_new_tokens=8) == want
    assert list(stream(lm, [1, 2], max_new_tokens=8)) == want[0]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signals")
def test_an_interrupt_leaves_a_whole_token():
    """Ctrl-C mostly arrives while the kernel runs: nothing is lost, and the stream goes on."""
    lm = model("mamba2", d_model=192, vocab_size=4096)
    want = generate(lm, [[1, 2]], max_new_tokens=200)[0]
    tokens_, interrupts, is_streaming = stream(lm, [1, 2], max_new_tokens=200), 0, False

    def interrupt(*_):
        # Python may run this some lines later than the signal came, where nobody waits for it.
        if is_streaming:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while tokens_.finish_reason is None:
            try:
                is_streaming = True
                signal.setitimer(signal.ITIMER_REAL, 0.002)
                list(tokens_)
                is_streaming = False
            except KeyboardInterrupt:
                interrupts += 1
            assert tokens_.ids == want[: len(tokens_.ids)]
            assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)  # a failure here shall not become one of other tests
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert tokens_.ids == want
    assert int(tokens_.cache.position_b[0]) == 2 + 200
    assert interrupts > 0


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_k": 5}, {"top_k": 20, "top_p": 0.7}, {"top_k": 9, "min_p": 0.2}]
)
def test_a_draw_from_few_equals_a_draw_from_all(options):
    """Choosing among the k likeliest alone gives the tokens of the whole vocabulary, masked."""
    lm = model("mamba1")
    prompts = [[1, 2, 3], [4], [5, 6]]
    few = generate(lm, prompts, max_new_tokens=20, temperature=0.9, **options)
    rest = {name: value for name, value in options.items() if name != "top_k"}
    mask = [lambda _, logits_w: keep_top_k(logits_w, options["top_k"])]
    everything = generate(lm, prompts, max_new_tokens=20, temperature=0.9, processors=mask, **rest)
    assert few == everything


def test_equal_logits_are_all_kept():
    """Where the last of the k are equal to others, those are drawn too, in some rows only."""
    lm = model("mamba1")

    def level(ids, logits_w):
        values = torch.zeros_like(logits_w) - 9
        values[:3] = 1.0 if len(ids) % 2 else torch.tensor([3.0, 2.0, 1.0])
        return values

    rows = generate(lm, [[1], [2]], max_new_tokens=80, temperature=1.0, top_k=2, processors=[level])
    assert {token for row in rows for token in row[1::2]} == {0, 1, 2}
    assert {token for row in rows for token in row[::2]} == {0, 1}
