"""The formal languages: answers agree with Python's own arithmetic, lengths are exact."""

import pytest

from formal_languages import LANGUAGES, MODULUS, SYMBOLS, UNASKED, answers_in
from training import seeded


def text_of(tokens):
    return "".join(SYMBOLS[token] for token in tokens)


def test_parity_counts_the_ones():
    tokens, answers = LANGUAGES["parity"].batch(8, 50, seeded(0))
    for row, asked in zip(tokens.tolist(), answers.tolist(), strict=True):
        assert [sum(row[: place + 1]) % 2 for place in range(50)] == asked


@pytest.mark.parametrize("task", ["arithmetic", "brackets"])
@pytest.mark.parametrize("length", [1, 3, 5, 21, 40, 255])
@pytest.mark.parametrize("uneven", [False, True])
def test_answers_are_those_of_python(task, length, uneven):
    """Every prefix that ends in an operand, its open brackets closed, has the answer as value."""
    tokens, answers = LANGUAGES[task].batch(16, length, seeded(1, length), uneven)
    for row, asked in zip(tokens.tolist(), answers.tolist(), strict=True):
        text = text_of(row)
        for end, answer in enumerate(asked, 1):
            if text[end - 1] in "01234)":
                assert value_of(text[:end]) == answer
            elif task == "arithmetic":
                assert answer == UNASKED
            else:  # the sign that a one would have here
                before = value_of(text[:end] + "0")
                difference = {"+": 1, "-": -1}[SYMBOLS[answer]]
                assert (value_of(text[:end] + "1") - before - difference) % MODULUS == 0
        assert text[-1] in "01234)"


def value_of(prefix):
    """Return what Python makes of an expression whose brackets are still open."""
    return eval(prefix + ")" * (prefix.count("(") - prefix.count(")"))) % MODULUS


def test_uneven_rows_lean_to_the_left_and_to_the_right():
    """The depth of trees of one length varies: that of a comb is larger than that of a bush."""
    spreads = []
    for uneven in (False, True):
        tokens = LANGUAGES["brackets"].batch(100, 60, seeded(5), uneven).tokens
        steps = (tokens == SYMBOLS.index("(")).int() - (tokens == SYMBOLS.index(")")).int()
        spreads.append(steps.cumsum(1).amax(1).float().std())
    assert spreads[1] > 1.5 * spreads[0]


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("length", range(1, 60))
def test_bracketed_expressions_have_the_length_asked_for(length, uneven):
    tokens, _ = LANGUAGES["brackets"].batch(3, length, seeded(length), uneven)
    assert tokens.shape == (3, length)


@pytest.mark.parametrize("task", LANGUAGES)
def test_uneven_rows_have_frequencies_of_their_own(task):
    """The share of zeros varies more between rows than chance would have it."""
    spreads = [
        (LANGUAGES[task].batch(200, 101, seeded(2), uneven).tokens == 0).float().mean(1).std()
        for uneven in (False, True)
    ]
    assert spreads[1] > 2 * spreads[0]


def test_the_examples_of_the_module_hold():
    plus, minus = SYMBOLS.index("+"), SYMBOLS.index("-")
    answers = [plus, 1, minus, minus, 4, minus, plus, 0, 0, 0]
    assert answers_in("(1-(2+-1))") == answers


@pytest.mark.parametrize("task", LANGUAGES)
def test_one_seed_gives_one_batch(task):
    first, again = (LANGUAGES[task].batch(4, 30, seeded(7)) for _ in range(2))
    assert first.tokens.equal(again.tokens)
    assert first.answers.equal(again.answers)
    assert not first.tokens.equal(LANGUAGES[task].batch(4, 30, seeded(8)).tokens)


def test_answers_are_even_enough_that_guessing_scores_nothing():
    """Zero is a likelier product than the others: what a constant answer reaches is bounded."""
    for language in LANGUAGES.values():
        _, answers = language.batch(2000, 101, seeded(3))
        share = (answers[:, -1:] == answers.new_tensor(range(language.classes))).float().mean(0)
        assert language.scaled(share.max().item()) < 6
