"""Whole = pieces = steps for every combination of family, MLP, schedule, residual and flags."""

from itertools import product
from typing import Any

import pytest
from stack_cases import (
    FAMILIES,
    GATES,
    assert_agree,
    build,
    config,
    in_pieces,
    inputs,
    outcome,
    stepwise,
    whole,
)

from anymamba.nn import ResidualConfig, VirtualLayers

SCHEDULES = {
    "once": None,
    "cyclic": VirtualLayers(4, "cyclic"),
    "stretched": VirtualLayers(4, "stretched"),
}
FLAGS = {"keeps": (), "first": ("skip_first",), "last": ("skip_last",)}
FLAGS["both"] = FLAGS["first"] + FLAGS["last"]


def combinations() -> list[Any]:
    """Return all of them but one: two layers that both drop their input have nothing to gate."""
    found = []
    for family, hidden, schedule, kind, flags in product(
        FAMILIES, (0, 16), SCHEDULES, ("add", "gates"), FLAGS
    ):
        if (schedule, kind, flags) == ("once", "gates", "both"):
            continue
        residual = ResidualConfig(
            multi_gate=GATES.multi_gate if kind == "gates" else None,
            **dict.fromkeys(FLAGS[flags], True),
        )
        options = {
            "family": family,
            "d_intermediate": hidden,
            "virtual": SCHEDULES[schedule],
            "residual": residual,
        }
        name = f"{family}-{'mlp' if hidden else 'plain'}-{schedule}-{kind}-{flags}"
        found.append(pytest.param(options, id=name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options", combinations())
def test_every_combination_keeps_the_laws(options: dict[str, Any]):
    """Outputs, states and gradients; pieces end on a border of a chunk and between two."""
    stack = build(config(**options))
    x_bsd = inputs(2, 7)
    expected = outcome(stack, whole(), x_bsd)
    for way in (in_pieces(4, 3), in_pieces(3, 4), stepwise()):
        assert_agree(expected, outcome(stack, way, x_bsd))
