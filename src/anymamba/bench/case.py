"""What a case is: one computation at one size, and the ways there are to do it.

Every way returns the tensors it computed: the outputs, and in mode `train` the gradients behind
them. So the same ways serve the gate, which compares them with the reference on a short sequence,
and the clock, which runs them on the long one.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba import settings
from anymamba.bench.machine import Work
from anymamba.bench.words import dtype_name

__all__ = [
    "EXACT",
    "GROUPS",
    "JUDGE",
    "MODES",
    "Case",
    "Way",
    "Ways",
    "backward",
    "candidates",
    "exact",
    "portable",
    "without",
]

GROUPS = (
    *("core", "scan", "conv", "small", "blocks"),
    *("prefill", "train", "memory", "decode", "growth", "profile"),
)
MODES = ("forward", "train", "step")
JUDGE = "reference"
# The reference in float32, whose errors are none beside those of half types.
EXACT = "exact"


class Way(NamedTuple):
    """One way of computing a case.

    Attributes:
        run: does it once.
        note: which algorithm it is, where there are several.
        around: what is entered before the clock starts.
        turns: how often it runs where one run takes seconds, without being warmed up; 0 lets the
            clock decide.
        outside: computes in memory that torch's allocator does not see.
        weighed: its memory is measured. Not where a run is a loop of a million small operations:
            the profiler's record of each would be larger than what it records.
    """

    run: Callable[[], Sequence[Tensor]]
    note: str = ""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    turns: int = 0
    outside: bool = False
    weighed: bool = True


# By column; a sentence instead of a way says why there is none.
Ways = dict[str, Way | str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One computation at one size.

    Attributes:
        group: which table it belongs to.
        name: what is computed, with its sizes.
        mode: "forward", "train" (forward and backward) or "step" (one token).
        dtype: of the activations.
        tokens: how many one run processes.
        work: what cannot be avoided.
        length: of the sequence that is timed.
        gate_length: of the shorter one that the reference judges.
        prepare: builds weights; returns the ways at a length, and the reference among them; for
            half types also the exact one.
        inputs: bytes of the operator's inputs; 0 where nobody asks for intermediates.
    """

    group: str
    name: str
    mode: str
    dtype: torch.dtype
    tokens: int
    work: Work
    length: int
    gate_length: int
    prepare: Callable[[], Callable[[int], Ways]]
    inputs: int = 0

    @property
    def title(self) -> str:
        """Name, mode and dtype."""
        return f"{self.name}, {self.mode}, {dtype_name(self.dtype)}"


def candidates(ways: Ways) -> Ways:
    """Return the ways that are judged and timed."""
    return {name: way for name, way in ways.items() if name not in (JUDGE, EXACT)}


def exact(run: Callable[[], Sequence[Tensor]], dtype: torch.dtype) -> Ways:
    """Return the exact way, for half types; float32 has no need of one.

    Args:
        run: the reference on the same numbers in float32.
        dtype: of the case.
    """
    return {} if dtype == torch.float32 else {EXACT: portable(run)}


def portable(run: Callable[[], Sequence[Tensor]], note: str = "", *, turns: int = 0) -> Way:
    """Return a way in which no compiled kernel of ours takes part, not even beside the scan."""
    return Way(run, note, lambda: settings.override(native="off"), turns)


def without(function: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
    """Return the function without gradients."""

    def run() -> Sequence[Tensor]:
        with torch.no_grad():
            return function()

    return run


def backward(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor] = (),
) -> Callable[[], Sequence[Tensor]]:
    """Return forward and backward of a function: its outputs, then the gradient of each leaf.

    Args:
        function: of the inputs.
        inputs: become leaves.
        weights: more leaves that the function knows by itself.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    heads: list[Tensor] = []

    def run() -> Sequence[Tensor]:
        outputs = list(function(*leaves))
        if not heads:
            heads.extend(_head(y) for y in outputs)
        return [*outputs, *torch.autograd.grad(outputs, [*leaves, *weights], heads)]

    return run


def _head(y: Tensor) -> Tensor:
    """Return a gradient that treats no two entries alike: equal ones would hide a mix-up."""
    return torch.linspace(-1, 1, y.numel(), dtype=torch.float32).view(y.shape).to(y.dtype)
