"""What a model can reach on a reset task without the ability that the task is about.

Two kinds of limit. A table gives every code of a place (its symbol, how many symbols since the last
reset) its most frequent answer: no model that knows only the code does better on those words. A cut
gives an ablated model the best possible readout of the number or the angle it computes.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from itertools import permutations

import torch
from torch import Tensor

from reset_tasks import IGNORE, RESET, Task, Word

LIMIT_SEED, TABLE_SEED = 0xE7A1, 0x51D3
Coder = Callable[[Word], list[Hashable]]


def accuracy(logits: Tensor, targets: Tensor) -> float:
    """Return the share of right answers among the places that count, in percent."""
    counts = targets != IGNORE
    return 100 * (logits.argmax(-1) == targets)[counts].double().mean().item()


def symbol_alone(word: Word) -> list[Hashable]:
    """Return each symbol: what a model without memory knows."""
    return list(word)


def steps_since_reset(word: Word) -> list[Hashable]:
    """Return each symbol with its distance from the last reset."""
    codes, steps = [], 0
    for symbol in word:
        steps = 0 if symbol == RESET else steps + 1
        codes.append((symbol, steps))
    return codes


def counts_since_reset(word: Word, *, modulus: int = 10**9) -> list[Hashable]:
    """Return how often each symbol came: all that commuting turns of one vector tell."""
    codes, counts = [], [0, 0]
    for symbol in word:
        if symbol == RESET:
            counts = [0, 0]
        else:
            counts[symbol] = (counts[symbol] + 1) % modulus
        codes.append(tuple(counts))
    return codes


def table_limit(task: Task, coder: Coder, fit: list[Word], test: list[Word]) -> float:
    """Return the accuracy in percent of the best table, fitted on words and tested on others."""
    seen: defaultdict[Hashable, Counter[int]] = defaultdict(Counter)
    for word in fit:
        for code, target in zip(coder(word), task.targets(word), strict=True):
            if target != IGNORE:
                seen[code][target] += 1
    table = {code: counts.most_common(1)[0][0] for code, counts in seen.items()}
    overall = sum(seen.values(), Counter()).most_common(1)[0][0]
    right = total = 0
    for word in test:
        for code, target in zip(coder(word), task.targets(word), strict=True):
            if target != IGNORE:
                right += table.get(code, overall) == target
                total += 1
    return 100 * right / total


def interval_limit(values: Tensor, targets: Tensor, classes: int) -> float:
    """Return the accuracy in percent of the best cut of a line into one interval per class."""
    return _cut_limit(values, targets, classes, permutations(range(classes)))


def sector_limit(angles: Tensor, targets: Tensor, classes: int) -> float:
    """Return the accuracy in percent of the best cut of a circle into one sector per class."""
    # Unrolled, the sector that contains the seam is the first interval and the last one.
    orders = ((*order, order[0]) for order in permutations(range(classes)))
    return _cut_limit(angles, targets, classes, orders)


def _cut_limit(
    values: Tensor, targets: Tensor, classes: int, orders: Iterable[tuple[int, ...]]
) -> float:
    # Values that differ by rounding alone must fall on the same side of every cut.
    _, place = (values.flatten().double() * 1e4).round().unique(return_inverse=True)
    counts = torch.zeros(int(place.max()) + 1, classes, dtype=torch.long)
    counts.index_put_((place, targets.flatten()), torch.ones_like(place), accumulate=True)
    best = 0
    for order in orders:
        # reached[i]: most right answers among the first i values, in the intervals so far.
        reached = torch.zeros(len(counts) + 1, dtype=torch.long)
        for label in order:
            before = torch.cat([reached.new_zeros(1), counts[:, label].cumsum(0)])
            reached = (reached - before).cummax(0).values + before
        best = max(best, int(reached[-1]))
    return 100 * best / targets.numel()
