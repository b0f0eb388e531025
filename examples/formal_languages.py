"""Three formal languages with exact answers: parity, modular arithmetic, and that with brackets.

    parity        1 0 1 1            ->  1 1 0 1               the ones so far, modulo 2
    arithmetic    2 - 3 * 4 + 1      ->  2 . 4 . 0 . 1         the value so far, modulo 5
    brackets      ( 1 - ( 2 + -1 ) ) ->  . 1 . . 4 . . 0 0 0   the same, open brackets closed here

A batch is `(tokens, answers)`, both (batch, length), with `UNASKED` where nothing is asked. It is a
function of the random generator that is passed in.
"""

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
    """A task: its sizes, how a batch of one length is made, and what a paper's cell looked like."""

    vocabulary: int
    classes: int
    batch: Callable[[int, int, torch.Generator], Batch]

    def scaled(self, accuracy: float) -> float:
        """Return percent of the way from guessing to perfect."""
        chance = 1 / self.classes
        return 100 * (accuracy - chance) / (1 - chance)


def parity(rows: int, length: int, generator: torch.Generator) -> Batch:
    """Draw bits; asked everywhere: is the number of ones so far odd?"""
    bits = torch.randint(2, (rows, length), generator=generator)
    return Batch(bits, bits.cumsum(1) % 2)


def arithmetic(rows: int, length: int, generator: torch.Generator) -> Batch:
    """Draw digits and `+ - *` in turn; asked at digits: the value so far, products first.

    An expression has an odd number of tokens, so an even length is one less.
    """
    operands = (length + 1) // 2
    digits = torch.randint(MODULUS, (rows, operands), generator=generator)
    signs = torch.randint(3, (rows, operands - 1), generator=generator)
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


def brackets(rows: int, length: int, generator: torch.Generator) -> Batch:
    """Draw trees of sums and differences; asked at digits and `)`: the value so far."""
    seed = int(torch.randint(2**62, (1,), generator=generator))
    source = random.Random(seed)
    texts = [bracketed(length, source) for _ in range(rows)]
    return Batch(
        torch.tensor([[SYMBOLS.index(symbol) for symbol in text] for text in texts]),
        torch.tensor([values_so_far(text) for text in texts]),
    )


def bracketed(length: int, source: random.Random) -> str:
    """Return an expression of exactly this many symbols: `(left + right)`, or a leaf below five."""
    digit = str(source.randrange(MODULUS))
    if length < 5:
        return {1: digit, 2: f"-{digit}", 3: f"({digit})", 4: f"(-{digit})"}[length]
    left = source.randint(1, length - 4)
    parts = bracketed(left, source), bracketed(length - 3 - left, source)
    return f"({parts[0]}{source.choice('+-')}{parts[1]})"


def values_so_far(text: str) -> list[int]:
    """Return the value of each prefix that ends in a digit or a bracket, else `UNASKED`."""
    values: list[int] = []
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
        values.append(total % MODULUS if after_operand else UNASKED)
    return values


LANGUAGES = {
    "parity": Language(2, 2, parity),
    "arithmetic": Language(len(SYMBOLS), MODULUS, arithmetic),
    "brackets": Language(len(SYMBOLS), MODULUS, brackets),
}
