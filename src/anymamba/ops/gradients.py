"""Gradients turned off in a way that an interrupt cannot leave behind."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["without_gradients"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
# Functions of C: Python looks for signals when it enters a function of its own, and after a call.
_are_on, _turn = torch.is_grad_enabled, torch._C._set_grad_enabled


def without_gradients(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function one that records no gradients, as `torch.no_grad()` does.

    `torch.no_grad` turns them on again in a function of Python's, and a Ctrl-C that arrives when it
    is entered leaves the caller without gradients for the rest of the program. Here nothing of
    Python's lies between the end of the function and that.

    Example:
        >>> @without_gradients
        ... def double(x):
        ...     return 2 * x
        >>> double(torch.ones(1, requires_grad=True)).requires_grad, torch.is_grad_enabled()
        (False, True)
    """

    @functools.wraps(function)
    def run(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        before = _are_on()
        try:
            _turn(False)
            return function(*args, **options)
        finally:
            _turn(before)

    return run
