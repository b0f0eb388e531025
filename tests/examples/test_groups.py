"""Words in groups: those of A5 are the published ones, and products are products."""

import pytest
import torch

from groups import EVAL_SEED, GROUPS, REFERENCE, TRAIN_SEED, compose

GOLDEN = {
    TRAIN_SEED: (
        [2, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 0],
        [0, 16, 25, 1, 17, 30, 6, 19, 30, 6, 22, 33, 36],
    ),
    EVAL_SEED: (
        [2, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1],
        [0, 16, 32, 45, 46, 49, 51, 55, 49, 51, 55, 49, 51],
    ),
}


@pytest.mark.parametrize("seed", GOLDEN)
def test_first_word_of_a5_is_the_golden_one(seed):
    word, targets = GOLDEN[seed]
    words = GROUPS["A5"].words(1, 12, seed)
    assert words.tolist() == [word]
    assert GROUPS["A5"].targets(words).tolist() == [targets]


@pytest.mark.parametrize(("name", "order"), [("A5", 60), ("S3", 6), ("Q8", 8)])
def test_generators_make_the_whole_group(name, order):
    """As many elements as the group has, the identity first, closed under products."""
    elements = GROUPS[name].elements
    assert len(elements) == order
    assert elements[0] == tuple(range(len(elements[0])))
    assert {compose(a, b) for a in elements for b in elements} == set(elements)


@pytest.mark.parametrize("name", GROUPS)
def test_order_matters(name):
    """No group here is abelian, so a state that only counts cannot know the product."""
    words = torch.tensor([[REFERENCE, 0, 1], [REFERENCE, 1, 0]])
    one, other = GROUPS[name].targets(words)[:, -1].tolist()
    assert one != other


def test_q8_multiplies_like_quaternions():
    """i i = j j = -1, and i j = - j i; the sign is central and squares to 1."""
    group = GROUPS["Q8"]
    ii, jj, ij, ji = group.targets(torch.tensor([[2, 0, 0], [2, 1, 1], [2, 1, 0], [2, 0, 1]]))[
        :, -1
    ].tolist()
    minus = group.elements[ii]
    assert ii == jj
    assert compose(minus, group.elements[ij]) == group.elements[ji]
    assert compose(minus, minus) == group.elements[0]
