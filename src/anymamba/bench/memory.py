"""Measuring memory: the peak of what torch's CPU allocator held while a function ran."""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["intermediate_bytes", "peak_and_result", "peak_bytes", "quiet_profiler", "tensor_bytes"]

T = TypeVar("T")


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the most bytes that were allocated at once while the function ran.

    Counts every allocation of torch's CPU allocator, temporaries inside kernels included, above
    what was allocated before.

    Example:
        >>> peak_bytes(lambda: torch.zeros(1000) + 1) >= 8000
        True
    """
    return peak_and_result(function)[0]


def peak_and_result(function: Callable[[], T]) -> tuple[int, T]:
    """Return the same peak, and what the function returned."""
    # A cycle that is collected meanwhile would hide as many bytes as it frees.
    gc.collect()
    with quiet_profiler(profile_memory=True) as profile:
        result = function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # pyright: ignore[reportOptionalMemberAccess]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        peak = max(peak, held)
    return peak, result


def tensor_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the tensors' elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


def intermediate_bytes(forward: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> int:
    """Return what a forward and backward hold at once beyond inputs, outputs and gradients.

    The inputs exist before and are not counted. The peak contains the outputs and the gradients of
    the inputs; gradients of the outputs are made beforehand.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.no_grad():
        grads = [torch.ones_like(y) for y in forward(*leaves)]
    peak = peak_bytes(lambda: torch.autograd.grad(list(forward(*leaves)), leaves, grads))
    return peak - tensor_bytes(grads) - tensor_bytes(leaves)


@contextmanager
def quiet_profiler(*, profile_memory: bool = False) -> Iterator[torch.profiler.profile]:
    """Run torch's profiler, and keep its native log lines off the terminal."""
    sys.stderr.flush()
    saved = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    activities = [torch.profiler.ProfilerActivity.CPU]
    try:
        os.dup2(sink, 2)
        with torch.profiler.profile(
            activities=activities, profile_memory=profile_memory
        ) as profile:
            yield profile
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
