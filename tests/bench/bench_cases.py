"""Cases small enough for a test, whose ways are written by the test itself."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anymamba.bench import Case, Rates, Report, Way, Work, describe_machine


def toy_case(
    ways: dict[str, Any],
    *,
    mode: str = "forward",
    group: str = "core",
    name: str = "toy",
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Return a case of the given ways; the judge answers with ones, unless given."""
    everything = {"reference": Way(lambda: [torch.ones(3)]), **ways}
    return Case(
        group=group,
        name=name,
        mode=mode,
        dtype=dtype,
        tokens=6,
        work=Work(flops=1000.0),
        length=5,
        gate_length=2,
        prepare=lambda: lambda length: everything,
        inputs=100,
    )


def answering(*values: float) -> Callable[[], Sequence[Tensor]]:
    """Return a run with this one result."""
    return lambda: [torch.tensor(values)]


@functools.cache
def _rates() -> Rates:
    return Rates([torch.float32], read_bytes=2**16)


def tiny_report(**more: Any) -> Report:
    """Return a report without rows; the rates were measured once, and are the caller's own."""
    return Report(machine=describe_machine(), rates=copy.deepcopy(_rates()), **more)
