"""Laws of the gate: nothing gets a time that does not compute what the reference computes."""

import dataclasses
import math

import pytest
import torch
from bench_cases import answering, toy_case

from anymamba.bench import SMALL as BLOCKS
from anymamba.bench import Effort, Way, backward, block_cases, measure
from anymamba.errors import BackendError

EFFORT = Effort(0.01, 1, 2)


def refuse() -> list[torch.Tensor]:
    raise BackendError("toy: impl='native' cannot serve this call: no such thing. Use another.")


def test_a_wrong_way_gets_no_time():
    """Its row is red, says by how much it is wrong, and has no speed."""
    wrong, right = measure(
        toy_case({"native": Way(answering(1, 1, 1.5)), "portable": Way(answering(1, 1, 1))}),
        EFFORT,
    )
    assert not wrong.ok
    assert wrong.timing is None
    assert wrong.tokens_per_second is None
    assert wrong.error == 0.5
    assert "5.0e-01" in wrong.why_not
    assert right.ok
    assert right.timing.runs >= 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_odd_number_slips_through(value):
    """NaN compares false with everything; the gate is red all the same."""
    [row] = measure(toy_case({"native": Way(answering(1, 1, value))}), EFFORT)
    assert not row.ok
    assert row.timing is None


def test_a_missing_result_is_wrong():
    """Another number or shape of results than the reference's is an error, not a crash."""
    [row] = measure(toy_case({"native": Way(answering(1, 1))}), EFFORT)
    assert not row.ok


def test_a_refusal_is_a_reason_and_no_error():
    """A kernel that cannot serve shows why, between the operator's name and the advice."""
    refused, absent = measure(
        toy_case({"native": Way(refuse), "transformers": "it is not here"}), EFFORT
    )
    assert (refused.ok, refused.timing, refused.why_not) == (True, None, "no such thing")
    assert (absent.ok, absent.timing, absent.why_not) == (True, None, "it is not here")


def test_a_way_may_be_too_slow_at_full_length_only():
    """It passes the gate on the short sequence, and says why the long one is not timed."""
    case = toy_case({})
    ways = case.prepare()(1)
    short, long = {**ways, "transformers": ways["reference"]}, {**ways, "transformers": "an hour"}
    at = {case.gate_length: short, case.length: long}
    [row] = measure(dataclasses.replace(case, prepare=lambda: at.__getitem__), EFFORT)
    assert (row.ok, row.timing, row.why_not, row.error) == (True, None, "an hour", 0.0)


def test_training_is_judged_by_its_gradients():
    """A way with right outputs and a wrong gradient is red."""
    x = torch.tensor([1.0, 2.0])
    right = backward(lambda x: [x * x], [x])
    wrong = backward(lambda x: [x * x.detach()], [x])
    assert torch.equal(right()[0], wrong()[0])
    ways = {"native": Way(wrong), "portable": Way(right), "reference": Way(right)}
    native, portable = measure(toy_case(ways, mode="train"), EFFORT)
    assert not native.ok
    assert portable.ok


def test_the_peak_contains_the_results():
    """Intermediates are the peak without outputs and gradients."""
    ways = {"reference": Way(lambda: [torch.full((1000,), 2.0)])}
    ways["portable"] = Way(lambda: [torch.ones(1000) + torch.ones(1)])
    [row] = measure(toy_case(ways), EFFORT)
    assert row.results == 4000
    assert 4000 <= row.intermediates <= 4100


@pytest.mark.parametrize("mode", ["forward", "train", "step"])
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_every_block_passes_the_gate(block, mode):
    """Portable code and transformers agree with the reference, and every number is there."""
    pytest.importorskip("transformers")
    [case] = block_cases("small", block._replace(length=9, width=64), [mode])
    rows = {row.way: row for row in measure(case, EFFORT)}
    assert all(row.ok for row in rows.values()), rows
    assert rows["portable"].timing
    assert rows["portable"].peak > 0
    has_peer = block.name in ("mamba1", "mamba2")
    assert (rows["transformers"].timing is not None) == has_peer
    assert case.tokens == (2 if mode == "step" else 18)
