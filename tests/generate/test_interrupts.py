"""Streams and single tokens that are interrupted at any line go on as if nothing had happened."""

import sys
from pathlib import Path

import pytest
import torch

import anymamba
from anymamba.generate import generate_detailed, stream
from anymamba.nn import with_room
from anymamba.settings import override
from decoder_cases import MODELS, model, used_cache

PACKAGE = Path(anymamba.__file__).parent
# Below these nothing is kept between two tokens.
PARTS = (
    "generate",
    "models/lm.py",
    "models/inputs.py",
    "models/decoder",
    "nn/cache_room.py",
    "ops/choose",
)
WHERE = tuple(str(PACKAGE / part) for part in PARTS)
# The blocks compute a new state and write nothing: who writes is `assign_`.
STEP_WHERE = tuple(str(PACKAGE / part) for part in (*PARTS, "nn/cache_methods.py"))
HOW = {"temperature": 1.0, "seed": 3, "max_new_tokens": 4}
OPTIONS = {
    "greedy": {"max_new_tokens": 4},
    "drawn from all": {**HOW, "top_p": 0.9},
    "drawn from few": {**HOW, "top_k": 8},
    "penalties": {
        "max_new_tokens": 4,
        "repetition_penalty": 1.7,
        "frequency_penalty": 3.0,
        "presence_penalty": 1.0,
    },
    "functions": {
        **HOW,
        "stop": lambda ids: len(ids) == 3,
        "processors": lambda ids, logits_w: logits_w + len(ids),
    },
}


class Interrupter:
    """Raises KeyboardInterrupt at one of the lines of certain files that run inside a `with`."""

    def __init__(self, at, where=WHERE):
        self.left, self.where = at, where

    def __enter__(self):
        sys.settrace(self.enter)

    def __exit__(self, *_):
        sys.settrace(None)

    def enter(self, frame, event, _):
        return self.line if frame.f_code.co_filename.startswith(self.where) else None

    def line(self, frame, event, _):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.line


def resumed(tokens, at):
    """Return what a stream yields that is interrupted at this line of its second token."""
    found = [next(tokens)]
    interrupter = Interrupter(at)
    try:
        with interrupter:
            found.append(next(tokens))
    except KeyboardInterrupt:
        found.append(next(tokens))
    return [*found, *tokens], interrupter.left > 0


@pytest.mark.parametrize(
    ("name", "native", "family"),
    [
        *((name, "auto", "mamba2") for name in OPTIONS),
        ("functions", "off", "mamba2"),
        # Its keys get more room during the very token that is interrupted.
        ("drawn from all", "auto", "turned halves"),
    ],
)
def test_an_interrupt_at_any_line_changes_nothing(name, native, family):
    """Tokens, log-probabilities, reason and state are those of the stream that nobody disturbed."""
    lm = model(family, n_layer=1 if family in MODELS else 2)
    with override(native=native):
        [want], [logprobs], cache, [reason] = generate_detailed(
            lm, [[1, 2]], logprobs=True, **OPTIONS[name]
        )
        at, is_through = 0, False
        while not is_through:
            at += 1
            tokens = stream(lm, [1, 2], logprobs=True, **OPTIONS[name])
            found, is_through = resumed(tokens, at)
            assert (found, tokens.ids, tokens.logprobs) == (want, want, logprobs), at
            assert tokens.finish_reason == reason, at
            # A mode that is not left again would be the caller's from then on.
            modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            assert modes == (True, False), at
            after, known = tokens.cache.to_tensors(), cache.to_tensors()
            assert all((after[name] - known[name]).abs().max() < 1e-5 for name in known), at
    assert at > 50


FAMILIES = {
    "mamba1": torch.float32,
    "mamba2": torch.bfloat16,
    "mamba3": torch.float16,
    "mamba3 quaternion": torch.float32,
}


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_interrupted_step_leaves_no_state_between_two_tokens(name, native):
    """All layers and the position are those before the token, or all are those after it."""
    lm = model(name, FAMILIES[name])
    ids_b, before = torch.tensor([1, 2]), used_cache(lm, 2)
    with override(native=native):
        lm.step_(ids_b, after := before.clone())
        at, is_through = 0, False
        while not is_through:
            at += 1
            cache, interrupter = before.clone(), Interrupter(at, STEP_WHERE)
            try:
                with interrupter:
                    lm.step_(ids_b, cache)
            except KeyboardInterrupt:
                pass
            is_through = interrupter.left > 0
            found = cache.to_tensors()
            is_before = [torch.equal(found[n], x) for n, x in before.to_tensors().items()]
            is_after = [torch.equal(found[n], x) for n, x in after.to_tensors().items()]
            assert all(is_before) or all(is_after), at
    assert all(is_after)
    assert at > 20


@pytest.mark.parametrize("has_room", [False, True])
@torch.no_grad()
def test_an_interrupted_hybrid_is_before_or_after_a_token(has_room):
    """Keys, values and their number move with all the rest; a full cache is never written to."""
    lm = model("convolved, with an MLP beside")
    ids_b, before = torch.tensor([1, 2]), used_cache(lm, 2)
    if has_room:
        before = with_room(before, 3)
    _, after = lm.advance(ids_b, before.clone())
    at, is_through = 0, False
    while not is_through:
        at += 1
        cache, interrupter = before.clone(), Interrupter(at)
        try:
            with interrupter:
                lm.advance(ids_b, cache)
        except KeyboardInterrupt:
            pass
        is_through = interrupter.left > 0
        found = cache.to_tensors()
        is_before = [torch.equal(found[n], x) for n, x in before.to_tensors().items()]
        is_after = [torch.equal(found[n], x) for n, x in after.to_tensors().items()]
        assert all(is_before) or (has_room and all(is_after)), at
    assert all(is_after) == has_room
    # A full cache is copied line by line.
    assert at > (40 if has_room else 100)


def test_a_stop_iteration_of_the_callers_is_an_error():
    """It would otherwise end the stream as if it were complete."""
    tokens = stream(model("mamba2"), [1], max_new_tokens=4, processors=lambda *_: next(iter([])))
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(tokens)


@pytest.mark.parametrize("native", ["auto", "off"])
def test_a_stream_tracks_no_gradients(native):
    """Outside any mode of the caller's, with a model and a processor that have parameters."""
    lm, shift = model("mamba2", n_layer=1), torch.zeros((), requires_grad=True)
    seen = []

    def processor(_, logits_w):
        seen.append((logits_w + shift).requires_grad)
        return logits_w + shift

    def stop(_):
        seen.append((1 + shift).requires_grad)
        return False

    functions = {"stop": stop, "processors": processor}
    with override(native=native):
        tokens = stream(lm, [1, 2], max_new_tokens=3, logprobs=True, **functions)
        assert len(list(tokens)) == 3
    assert seen == [False] * 6
    assert not any(state.requires_grad for state in tokens.cache.to_tensors().values())


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_stream_may_leave_the_mode_it_was_made_in(name, native):
    """Made and begun in inference mode, taken up outside of it, and the other way round."""
    lm = model("mamba2", n_layer=1)
    with override(native=native):
        [want], [logprobs], *_ = generate_detailed(lm, [[1, 2]], logprobs=True, **OPTIONS[name])
        with torch.inference_mode():
            made_inside = stream(lm, [1, 2], logprobs=True, **OPTIONS[name])
            begun = next(made_inside)
        assert [begun, *made_inside] == want
        made_outside = stream(lm, [1, 2], logprobs=True, **OPTIONS[name])
        begun = next(made_outside)
        with torch.inference_mode():
            assert [begun, *made_outside] == want
    assert made_inside.logprobs == made_outside.logprobs == logprobs
    assert not any(state.is_inference() for state in made_inside.cache.to_tensors().values())
