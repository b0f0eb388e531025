"""One layer with quaternions can follow A5 for ever, and the group is really the icosahedron's."""

import pytest
import torch

from group_models import build_a5, icosahedral, matrix_of, model_of, multiply
from group_words import one_hot
from groups import EVAL_SEED, GROUPS


@pytest.mark.parametrize(("rotation", "expected"), [("complex", 10860), ("quaternion", 13764)])
def test_models_are_as_small_as_the_original(rotation, expected):
    model = model_of(GROUPS["A5"], rotation=rotation, has_mlp=False)
    assert sum(weight.numel() for weight in model.parameters()) == expected


def test_hand_built_weights_are_right_at_every_depth():
    """Ten times deeper than anything the models are trained on."""
    group = GROUPS["A5"]
    words = group.words(64, 120, EVAL_SEED)
    with torch.no_grad():
        answers = build_a5()(one_hot(words)).argmax(-1)
    assert torch.equal(answers, group.targets(words))


def test_classes_are_the_rotations_of_an_icosahedron():
    """Sixty different rotations, and each generator acts on them as it does on the classes."""
    first, second, elements = icosahedral()
    matrices = torch.stack([matrix_of(element).flatten() for element in elements])
    traces = matrices @ matrices.T  # of R(a) R(b)^T
    assert torch.equal(traces > 3 - 1e-6, torch.eye(60, dtype=torch.bool))
    for symbol, generator in enumerate((first, second)):
        for number, element in enumerate(elements):
            there = elements[int(GROUPS["A5"].table[symbol, number])]
            torch.testing.assert_close(matrix_of(multiply(generator, element)), matrix_of(there))


def test_a_quaternion_and_its_negative_are_one_element():
    """Why the readout of A5 must be even, and cannot be linear: some word spells minus one."""
    first, _, elements = icosahedral()
    power = elements[0]
    for _ in range(5):
        power = multiply(first, power)
    torch.testing.assert_close(power, -elements[0])
    torch.testing.assert_close(matrix_of(power), matrix_of(elements[0]))
