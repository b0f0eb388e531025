"""Three tasks of one shape: fold the symbols since the last reset, and say the result each time.

    reset-majority   symbols - + R   which sign leads since the last R         (a decaying sum that
                                                                                can be emptied)
    reset-rotor      symbols - + R   (number of + less number of -) mod 3      (a turning state)
    reset-spinor     symbols i j R   the product of the quaternions i and j    (turns that do not
                                                                                commute)

Each is about the smallest task that needs what it is named after. Each has three families of words:
`random`, and two in which the shortcuts that random words reward are wrong. Accuracy is reported
for each family by itself, because their mean hides which shortcut a model has found.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from splitmix import SplitMix64

LENGTH = 32
TRAIN_SEED, EVAL_SEED = 0xC0FFEE, 0xBEEF
MIXED = "mixed"
IGNORE = -100  # the target of a place that does not count
RESET = 2

Word = list[int]


@dataclass(frozen=True)
class Task:
    """Symbols, families of words, and what is to be said at each place.

    Args:
        name: of the task.
        symbols: how symbols 0, 1 and 2 are written; 2 is the reset.
        classes: number of answers.
        families: makers of words by name; `random` first, then the two adversarial ones.
        targets: the answers to a word; `IGNORE` where there is none.
    """

    name: str
    symbols: str
    classes: int
    families: dict[str, Callable[[SplitMix64], Word]]
    targets: Callable[[Word], list[int]]

    def words(self, family: str, count: int, seed: int) -> list[Word]:
        """Return words of a family, or of all (`mixed`: a half random, a quarter of each other)."""
        rng = SplitMix64(seed)
        if family != MIXED:
            return [self.families[family](rng) for _ in range(count)]
        random, first, second = self.families.values()
        makers = (first, second, random, random)
        return [makers[rng.below(4)](rng) for _ in range(count)]

    def write(self, word: Word) -> str:
        """Return a word as text."""
        return "".join(self.symbols[symbol] for symbol in word)

    def read(self, text: str) -> Word:
        """Return a text as a word."""
        return [self.symbols.index(letter) for letter in text]


def batch_of(task: Task, words: list[Word]) -> tuple[Tensor, Tensor]:
    """Return inputs (words, length, 3) as one-hot vectors, and targets (words, length)."""
    x = F.one_hot(torch.tensor(words), len(task.symbols)).float()
    return x, torch.tensor([task.targets(word) for word in words])


def either(rng: SplitMix64) -> tuple[int, int]:
    """Return the two symbols that are no reset, in a random order."""
    return (1, 0) if rng.below(2) == 0 else (0, 1)


def draw(rng: SplitMix64, even: int) -> int:
    """Return the reset once in eight draws, else one of the others; `even` is drawn by 2, 4, 6."""
    number = rng.below(8)
    if number == 0:
        return RESET
    return even if number % 2 == 0 else 1 - even


# Majority: symbol 0 votes -, symbol 1 votes +.


def majority_random(rng: SplitMix64) -> Word:
    """Return independent symbols."""
    return [draw(rng, even=1) for _ in range(LENGTH)]


def majority_long_prefix(rng: SplitMix64) -> Word:
    """Return a long run before a reset that must be forgotten, and a close vote after it."""
    after = 5 + 2 * rng.below(8)
    run, opposite = either(rng)
    half = after // 2
    return [run] * (31 - after) + [RESET] + [opposite] * (half + 1) + [run] * half


def majority_long_suffix(rng: SplitMix64) -> Word:
    """Return a long close vote, whose early half must not fade before its late half."""
    word = [1 if rng.below(2) == 0 else 0 for _ in range(1 + rng.below(3))] + [RESET]
    early, late = either(rng)
    rest = LENGTH - len(word)
    close = (rest - 1) // 2
    return word + [early] * (rest - close) + [late] * close


def majority_targets(word: Word) -> list[int]:
    """Return 1 where + leads, 0 where - leads, `IGNORE` at a draw."""
    vote, targets = 0, []
    for symbol in word:
        vote = 0 if symbol == RESET else vote + (1 if symbol == 1 else -1)
        targets.append(IGNORE if vote == 0 else int(vote > 0))
    return targets


# Rotor: symbol 0 turns back, symbol 1 turns forth, by a third of a circle.


def rotor_random(rng: SplitMix64) -> Word:
    """Return a reset and independent symbols."""
    return [RESET] + [draw(rng, even=1) for _ in range(LENGTH - 1)]


def rotor_drift(rng: SplitMix64) -> Word:
    """Return turns that go one way seven times in eight: many whole circles."""
    run, opposite = either(rng)
    return [RESET] + [opposite if rng.below(8) == 0 else run for _ in range(LENGTH - 1)]


def rotor_balanced(rng: SplitMix64) -> Word:
    """Return as many turns forth as back (one more): a counter stays near 0."""
    return [RESET, *rng.shuffle([1] * 16 + [0] * 15)]


def rotor_targets(word: Word) -> list[int]:
    """Return the turns since the last reset, modulo 3."""
    turns, targets = 0, []
    for symbol in word:
        turns = 0 if symbol == RESET else (turns + (1 if symbol == 1 else -1)) % 3
        targets.append(turns)
    return targets


# Spinor: symbols 0 and 1 are the unit quaternions i and j.

# The unit (1, i, j, k) and the sign of i * unit and j * unit.
LEFT_PRODUCT = (
    ((1, 1), (0, -1), (3, 1), (2, -1)),
    ((2, 1), (3, -1), (0, -1), (1, 1)),
)


def spinor_random(rng: SplitMix64) -> Word:
    """Return a reset and independent symbols."""
    return [RESET] + [draw(rng, even=0) for _ in range(LENGTH - 1)]


def spinor_shuffle(rng: SplitMix64) -> Word:
    """Return words that differ in the order of their factors alone."""
    return [RESET, *rng.shuffle([0] * 16 + [1] * 15)]


def spinor_runs(rng: SplitMix64) -> Word:
    """Return runs of three to eight equal factors, which visit all powers."""
    word, symbol = [RESET], either(rng)[1]
    while len(word) < LENGTH:
        word += [symbol] * (3 + rng.below(6))
        symbol = 1 - symbol
    return word[:LENGTH]


def spinor_targets(word: Word) -> list[int]:
    """Return the product since the last reset, the newest factor on the left.

    Classes 0 to 3 are 1, i, j, k; classes 4 to 7 are their negatives.
    """
    unit, negative, targets = 0, False, []
    for symbol in word:
        if symbol == RESET:
            unit, negative = 0, False
        else:
            unit, sign = LEFT_PRODUCT[symbol][unit]
            negative ^= sign < 0
        targets.append(unit + 4 * negative)
    return targets


TASKS = {
    task.name: task
    for task in (
        Task(
            "reset-majority",
            "-+R",
            2,
            {
                "random": majority_random,
                "long prefix": majority_long_prefix,
                "long suffix": majority_long_suffix,
            },
            majority_targets,
        ),
        Task(
            "reset-rotor",
            "-+R",
            3,
            {"random": rotor_random, "drift": rotor_drift, "balanced": rotor_balanced},
            rotor_targets,
        ),
        Task(
            "reset-spinor",
            "ijR",
            8,
            {"random": spinor_random, "shuffle": spinor_shuffle, "runs": spinor_runs},
            spinor_targets,
        ),
    )
}
