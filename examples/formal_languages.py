"""Three formal languages with exact answers: parity, modular arithmetic, and that with brackets.

    parity        1 0 1 1            ->  1 1 0 1               the ones so far, modulo 2
    arithmetic    2 - 3 * 4 + 1      ->  2 . 4 . 0 . 1         the value so far, modulo 5
    brackets      ( 1 - ( 2 + -1 ) ) ->  + 1 - - 4 - + 0 0 0   open brackets closed here;
                                                               else the sign of what comes next

A batch is `(tokens, answers)`, both (batch, length), with `UNASKED` where nothing is asked. It is a
function of the random generator that is passed in. In an `uneven` batch every row has its own
frequencies of symbols, and brackets a shape of their own, from `((1+2)+3)` to `(1+(2+3))`: a row of
nearly all ones shows an error of each one sooner than a fair row of the same length does.
"""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MODULUS = 5
UNASKED = -100
SYMBOLS = "01234+-*()"


class Batch(NamedTuple):
    """Tokens and what is asked at each of them."""

    tokens: Tensor
    answers: Tensor


class Language(NamedTuple):
    """A task: its sizes, and how a batch of one length is made."""

    vocabulary: int
    classes: int
    draw: Callable[[int, int, torch.Generator, bool], Batch]

    def batch(
        self, rows: int, length: int, generator: torch.Generator, uneven: bool = False
    ) -> Batch:
        """Return rows of one length; symbols are equally likely unless `uneven`."""
        return self.draw(rows, length, generator, uneven)

    def scaled(self, accuracy: float) -> float:
        """Return percent of the way from guessing to perfect."""
        chance = 1 / self.classes
        return 100 * (accuracy - chance) / (1 - chance)


def symbols(kinds: int, rows: int, length: int, generator: torch.Generator, uneven: bool) -> Tensor:
    """Draw numbers below `kinds`; if uneven, with frequencies of each row's own."""
    if not uneven:
        return torch.randint(kinds, (rows, length), generator=generator)
    weights = torch.empty(rows, kinds).exponential_(generator=generator)  # even on the simplex
    return torch.multinomial(weights, length, replacement=True, generator=generator)


def parity(rows: int, length: int, generator: torch.Generator, uneven: bool) -> Batch:
    """Draw bits; asked everywhere: is the number of ones so far odd?"""
    bits = symbols(2, rows, length, generator, uneven)
    return Batch(bits, bits.cumsum(1) % 2)


def arithmetic(rows: int, length: int, generator: torch.Generator, uneven: bool) -> Batch:
    """Draw digits and `+ - *` in turn; asked at digits: the value so far, products first.

    An expression has an odd number of tokens, so an even length is one less.
    """
    operands = (length + 1) // 2
    digits = symbols(MODULUS, rows, operands, generator, uneven)
    # One more sign than is needed: none cannot be drawn.
    signs = symbols(3, rows, operands, generator, uneven)[:, 1:]
    tokens = torch.empty(rows, 2 * operands - 1, dtype=torch.int64)
    tokens[:, ::2], tokens[:, 1::2] = digits, signs + SYMBOLS.index("+")
    answers = torch.full_like(tokens, UNASKED)
    total, term = torch.zeros(rows, dtype=torch.int64), digits[:, 0]
    answers[:, 0] = term
    for place in range(1, operands):
        digit, sign = digits[:, place], signs[:, place - 1]
        total = torch.where(sign == 2, total, total + term)
        term = torch.where(sign == 2, term * digit % MODULUS, torch.where(sign == 1, -digit, digit))
        answers[:, 2 * place] = (total + term) % MODULUS
    return Batch(tokens, answers)


def brackets(rows: int, length: int, generator: torch.Generator, uneven: bool) -> Batch:
    """Draw trees of sums and differences; asked at digits and `)`: the value so far; else a sign.

    The signs are the steps of the calculation. Without them a value is asked that depends on all
    brackets at once, and three layers memorise short expressions instead of the rule.
    """
    seed = int(torch.randint(2**62, (1,), generator=generator))
    source = random.Random(seed)
    texts = [
        bracketed(length, source, weights_of(source, uneven), lean_of(source, uneven))
        for _ in range(rows)
    ]
    return Batch(
        torch.tensor([[SYMBOLS.index(symbol) for symbol in text] for text in texts]),
        torch.tensor([answers_in(text) for text in texts]),
    )


def weights_of(source: random.Random, uneven: bool) -> dict[str, float]:
    """Return how likely each digit and each sign is, among its kind."""
    return {symbol: source.expovariate(1) if uneven else 1.0 for symbol in "01234+-"}


def lean_of(source: random.Random, uneven: bool) -> float:
    """Return where trees grow: below 1 to the left, above 1 to the right."""
    return math.exp(source.uniform(-2, 2)) if uneven else 1.0


def bracketed(
    length: int, source: random.Random, weights: dict[str, float], lean: float = 1.0
) -> str:
    """Return an expression of exactly this many symbols: `(left + right)`, or a leaf below five."""

    def draw(kinds: str) -> str:
        return source.choices(kinds, [weights[kind] for kind in kinds])[0]

    if length < 5:
        digit = draw("01234")
        return {1: digit, 2: f"-{digit}", 3: f"({digit})", 4: f"(-{digit})"}[length]
    left = 1 + int((length - 4) * source.random() ** lean)
    first = bracketed(left, source, weights, lean)
    return f"({first}{draw('+-')}{bracketed(length - 3 - left, source, weights, lean)})"


def answers_in(text: str) -> list[int]:
    """Return the value of each prefix that ends in a digit or a bracket, else a sign's symbol."""
    answers: list[int] = []
    total, sign_around, sign_ahead, signs_outside = 0, 1, 1, []
    after_operand = False
    for symbol in text:
        if symbol == "(":
            signs_outside.append(sign_around)
            sign_around = sign_ahead
        elif symbol == ")":
            sign_around = signs_outside.pop()
        elif symbol.isdigit():
            total += sign_ahead * int(symbol)
        elif after_operand:
            sign_ahead = sign_around if symbol == "+" else -sign_around
        else:
            sign_ahead = -sign_ahead  # a minus in front of an operand
        after_operand = symbol == ")" or symbol.isdigit()
        sign = SYMBOLS.index("+" if sign_ahead > 0 else "-")
        answers.append(total % MODULUS if after_operand else sign)
    return answers


LANGUAGES = {
    "parity": Language(2, 2, parity),
    "arithmetic": Language(len(SYMBOLS), MODULUS, arithmetic),
    "brackets": Language(len(SYMBOLS), MODULUS, brackets),
}
