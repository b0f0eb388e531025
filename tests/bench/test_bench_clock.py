"""Laws of the clock and of the machine's rates."""

import gc
import time
from contextlib import contextmanager

import pytest
import torch

from anymamba.bench import Rates, Timing, Work, describe_machine, interleave, peak_bytes


def test_functions_run_in_turns():
    """A, B, A, B: a busy moment hurts all alike."""
    order = []
    interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, most=3)
    assert order == ["a", "b"] * 3


def test_a_slow_function_leaves_the_round_after_its_least_runs():
    """Time is shared fairly: who has used up the seconds makes room, but not before `least`."""
    timings = interleave(
        {"slow": lambda: time.sleep(0.02), "fast": lambda: None}, seconds=0.01, least=2, most=7
    )
    assert (timings["slow"].runs, timings["fast"].runs) == (2, 7)
    assert timings["slow"].median >= 0.02


def test_who_says_how_often_runs_as_often():
    """Whatever the time and the limits of the others, and in turns with them."""
    order = []
    functions = {name: lambda name=name: order.append(name) for name in "abc"}
    interleave(functions, least=2, most=2, turns={"a": 1, "c": 3})
    assert "".join(order) == "abcbcc"


def test_what_surrounds_a_function_is_not_timed():
    """Entering and leaving a context belongs to nobody's time."""

    @contextmanager
    def waiting():
        time.sleep(0.02)
        yield
        time.sleep(0.02)

    timing = interleave({"a": lambda: None}, most=3, around={"a": waiting})["a"]
    assert timing.median < 0.01


def test_the_collector_rests_during_measurements_and_works_again_after():
    """Garbage collection is not part of a measurement, and a failing function changes nothing."""
    seen = []
    interleave({"a": lambda: seen.append(gc.isenabled())}, most=2)
    assert seen == [False, False]
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        interleave({"a": lambda: 1 / 0})
    assert gc.isenabled()


def test_the_spread_is_half_the_middle_half():
    """The spread is relative to the median."""
    assert Timing(median=2.0, low=1.5, high=2.5, runs=4).spread == 0.25
    assert interleave({"a": lambda: None}, least=1, most=1)["a"].spread == 0.0


def test_the_ideal_is_the_slower_of_arithmetic_and_traffic():
    """Both may overlap, so they are not added."""
    assert Work(flops=10.0, moved=1.0).seconds(mm=2.0, bandwidth=1.0) == 5.0
    assert Work(flops=1.0, moved=10.0).seconds(mm=2.0, bandwidth=1.0) == 10.0


def test_rates_are_medians_of_their_probes():
    """One odd probe does not move the rate."""
    rates = Rates([torch.float32], read_bytes=2**16)
    rates.probe()
    rates.products[torch.float32][:] = [1.0, 2.0, 900.0]
    rates.reads[:] = [3.0, 1.0, 2.0]
    assert rates.mm(torch.float32) == 2.0
    assert rates.bandwidth == 2.0


def test_an_emulated_dtype_is_held_to_float32():
    """A slow matrix product in a half type is no excuse: code may widen."""
    rates = Rates([torch.float32], read_bytes=2**16)
    rates.products[torch.float32][:] = [5.0]
    for bfloat16, limit in ((1.0, 5.0), (9.0, 9.0)):
        rates.products[torch.bfloat16] = [bfloat16]
        assert rates.limit(torch.bfloat16) == limit
        assert rates.mm(torch.bfloat16) == bfloat16


def test_the_rate_of_a_product_counts_two_flop_per_pair(monkeypatch):
    """A product of n x n matrices is 2 n^3 FLOP; where it is slow, n stays small."""
    monkeypatch.setattr("anymamba.bench.machine._best", lambda function, runs=3: 0.5)
    rates = Rates([torch.float32], read_bytes=2**16)
    assert rates.mm(torch.float32) == 2 * 256**3 / 0.5
    assert rates.bandwidth == 2**16 / 0.5


def test_the_machine_is_named():
    """Every field says something."""
    machine = describe_machine()
    assert all(str(value) for value in machine)
    assert machine.threads == torch.get_num_threads()
    assert f"torch {torch.__version__}" in str(machine)


def test_the_peak_sees_what_is_freed_again():
    """A temporary counts although nothing of it is left."""
    assert 8000 <= peak_bytes(lambda: (torch.zeros(1000) + 1).sum()) < 8200
