"""The gate: nothing is timed that does not compute what the reference computes.

It is a tripwire in front of the clock; whether an implementation is right is for the tests.

Two results in a half type differ by the rounding of both, and through a stack of layers that grows
to a tenth of the largest gradient. So there the judge is the reference in float32, and how far a
way may stray from it is measured too: by how far the reference in the half type strays.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.bench.case import EXACT, JUDGE, Case, Way, Ways, candidates
from anymamba.errors import BackendError

__all__ = ["Verdict", "error_of", "judge", "reason_of"]

# Error over the largest value: rounding through a short scan, and through a stack of layers. The
# tests hold operators to less; here a wrong formula is to be told from rounding.
LIMITS = {"forward": 2e-4, "step": 2e-4, "train": 1e-3}
# Of half types: a few roundings of a result, and twice the reference's own error. That error is the
# worst of all tensors: in one with a few entries the reference may be right by chance.
HALF_FLOOR = 2e-2
HALF_FACTOR = 2.0
# More is no rounding, whatever the reference does.
HALF_MOST = 0.5


class Verdict(NamedTuple):
    """How far a way lies from the reference, or why it did not run."""

    error: float | None
    limit: float
    why_not: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the way agrees, or honestly did not run."""
        return self.error is None or self.error <= self.limit


def judge(case: Case, ways: Ways) -> dict[str, Verdict]:
    """Run every way once and compare it with the reference.

    Args:
        case: tells mode and dtype.
        ways: at the gate's length, the reference among them, and for half types the exact one.
    """
    expected, limit = _expectation(case, ways)
    return {name: _verdict(way, expected, limit) for name, way in candidates(ways).items()}


def _expectation(case: Case, ways: Ways) -> tuple[Sequence[Tensor], float]:
    """Return what every way should compute, and how far it may lie from it."""
    reference = _run(ways[JUDGE])
    if case.dtype == torch.float32:
        return reference, LIMITS[case.mode]
    exact = _run(ways[EXACT])
    return exact, min(HALF_FLOOR + HALF_FACTOR * error_of(exact, reference), HALF_MOST)


def _run(way: Way | str) -> Sequence[Tensor]:
    assert isinstance(way, Way)
    with way.around():
        return way.run()


def _verdict(way: Way | str, expected: Sequence[Tensor], limit: float) -> Verdict:
    if isinstance(way, str):
        return Verdict(None, limit, way)
    try:
        return Verdict(error_of(expected, _run(way)), limit)
    except BackendError as error:
        return Verdict(None, limit, reason_of(error))


def error_of(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Return the largest difference over the largest value, tensor by tensor; NaN counts as one.

    Example:
        >>> error_of([torch.tensor([1.0, 4.0])], [torch.tensor([1.0, 5.0])])
        0.25
    """
    if [x.shape for x in expected] != [x.shape for x in actual]:
        return float("inf")
    worst = 0.0
    for want, got in zip(expected, actual, strict=True):
        want, got = want.detach().float(), got.detach().float()
        error = float((want - got).abs().max() / want.abs().max().clamp(min=1e-6))
        if not error <= worst:  # NaN too
            worst = error if error == error else float("inf")
    return worst


def reason_of(error: BackendError) -> str:
    """Return what is between the name of the operator and the advice.

    Example:
        >>> reason_of(BackendError("ssd: impl='native' cannot serve this call: no kernel. Wait."))
        'no kernel'
        >>> reason_of(BackendError("bench: llama.cpp could not load it."))
        'llama.cpp could not load it'
    """
    text = str(error).partition(": ")[2].partition(". ")[0].removesuffix(".")
    return re.sub("^.*cannot serve this (call|token): ", "", text)
