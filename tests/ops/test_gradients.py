"""Gradients turned off around a function: nested, after an error, and after any interrupt."""

import signal
import time

import pytest
import torch

from anymamba.ops import without_gradients


@without_gradients
def double(x):
    return 2 * x


def test_nothing_is_recorded_and_the_mode_comes_back():
    x = torch.ones(2, requires_grad=True)
    assert not double(x).requires_grad
    assert (2 * x).requires_grad
    with torch.no_grad():
        double(x)
        assert not torch.is_grad_enabled()


def test_an_error_brings_the_mode_back():
    @without_gradients
    def fail():
        raise ValueError("as asked")

    with pytest.raises(ValueError, match="as asked"):
        fail()
    assert torch.is_grad_enabled()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer that sends signals")
def test_an_interrupt_at_any_moment_brings_the_mode_back():
    """`torch.no_grad` fails this within a second: it leaves its block in a function of Python's."""

    def interrupt(*_):
        raise KeyboardInterrupt

    x, lost, interrupts = torch.ones(1), 0, 0
    before = signal.signal(signal.SIGALRM, interrupt)
    end = time.monotonic() + 2
    try:
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
                while True:
                    double(x)
            except KeyboardInterrupt:
                interrupts += 1
            lost += not torch.is_grad_enabled()
            torch.set_grad_enabled(True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 100
    assert lost == 0
