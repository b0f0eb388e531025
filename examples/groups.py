"""Words in finite groups: fold generators into a running product, and say the element each time.

    A5   the 60 even permutations of five things, the smallest group that is not solvable
    S3   the 6 permutations of three things
    Q8   the 8 unit quaternions 1, i, j, k and their negatives

A state whose transitions commute knows how often each generator came, but not in which order. In S3
and Q8 a few layers of such states can work the order out, because these groups are solvable: they
are built of commuting steps. A5 is not.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from splitmix import SplitMix64

Permutation = tuple[int, ...]

TRAIN_SEED, EVAL_SEED = 0xC0FFEE, 0xBEEF
# The first symbol of every word. It is written into the state, and everything after it turns it: a
# rotated readout sees only the rotation between a write and a read.
REFERENCE = 2


@dataclass(frozen=True)
class Group:
    """A group by two of its elements, which generate it.

    Args:
        name: of the group.
        generators: permutations of the same things; symbols 0 and 1.
    """

    name: str
    generators: tuple[Permutation, Permutation]

    @cached_property
    def elements(self) -> list[Permutation]:
        """All products of generators in the order of dictionaries; the identity is first."""
        found = {tuple(range(len(self.generators[0])))}
        new = found
        while new:
            new = {compose(g, element) for g in self.generators for element in new} - found
            found |= new
        return sorted(found)

    @cached_property
    def table(self) -> Tensor:
        """The class of `generator * element`, by symbol and class: (2, elements)."""
        number = {element: place for place, element in enumerate(self.elements)}
        return torch.tensor(
            [[number[compose(g, element)] for element in self.elements] for g in self.generators]
        )

    def words(self, count: int, depth: int, seed: int) -> Tensor:
        """Return words of the reference and `depth` generators (count, depth + 1)."""
        rng = SplitMix64(seed)
        return torch.tensor(
            [[REFERENCE] + [rng.below(2) for _ in range(depth)] for _ in range(count)]
        )

    def targets(self, words: Tensor) -> Tensor:
        """Return the running product at every place, the newest factor on the left."""
        product = torch.zeros_like(words[:, 0])
        products = [product]
        for symbols in words[:, 1:].unbind(1):
            product = self.table[symbols, product]
            products.append(product)
        return torch.stack(products, 1)


def compose(after: Permutation, before: Permutation) -> Permutation:
    """Return the permutation that does one thing and then the other."""
    return tuple(after[place] for place in before)


GROUPS = {
    group.name: group
    for group in (
        Group("A5", ((1, 2, 3, 4, 0), (1, 2, 0, 3, 4))),
        Group("S3", ((1, 0, 2), (1, 2, 0))),
        # i and j, as they move 1, i, j, k, -1, -i, -j, -k when they multiply from the left.
        Group("Q8", ((1, 4, 3, 6, 5, 0, 7, 2), (2, 7, 4, 1, 6, 3, 0, 5))),
    )
}
