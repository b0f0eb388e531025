"""Brackets: the weights worked out by hand answer everything, and by the means they claim."""

import pytest
import torch

from brackets_by_hand import DEPTHS, TOKEN, brackets_by_hand
from formal_languages import LANGUAGES, answers_in
from state_tracking import after_start
from training import seeded


def share_right(model, texts):
    """Return the share of right answers at each place, for texts of one length."""
    tokens = torch.tensor([[TOKEN[symbol] for symbol in f"^{text}"] for text in texts])
    answers = torch.tensor([answers_in(text) for text in texts])
    with torch.no_grad():
        return (model(tokens)[:, 1:].argmax(-1) == answers).float().mean(0)


@pytest.mark.parametrize("length", [*range(1, 12), 40, 256, 2000])
def test_four_blocks_can_calculate_with_brackets_at_any_length(length):
    language = LANGUAGES["brackets"]
    tokens, answers = after_start(language.batch(16, length, seeded(4)), language)
    with torch.no_grad():
        right = brackets_by_hand()(tokens).argmax(-1) == answers
    assert right[:, 1:].all()


def nested(depth):
    """Return an expression with this many open brackets, an even number."""
    return "((1-" * (depth // 2) + "-2" + ")-3)" * (depth // 2)


def test_every_depth_below_32_is_told_apart():
    deep = nested(DEPTHS - 2)
    assert share_right(brackets_by_hand(), [f"({deep}-{deep})"]).all()
    assert not share_right(brackets_by_hand(), [nested(DEPTHS + 2)]).all()


@pytest.mark.parametrize("rotation_range", [1.95, 2.05])
def test_exact_turns_are_what_makes_it_right(rotation_range):
    language = LANGUAGES["brackets"]
    tokens, answers = after_start(language.batch(64, 256, seeded(4)), language)
    with torch.no_grad():
        right = brackets_by_hand(rotation_range)(tokens).argmax(-1) == answers
    assert right[:, -1].float().mean() < 0.5


def test_a_sign_is_undone_because_its_scope_remembers_it():
    """Without the second block, signs before a bracket hold on behind it."""
    model = brackets_by_hand()
    texts = ["((1-2)+3)", "((1+2)-3)"]
    assert share_right(model, texts).all()
    with torch.no_grad():
        model.backbone.layers[1].mixer.out_proj.weight.zero_()
    assert share_right(model, texts)[-1] == 0.5
