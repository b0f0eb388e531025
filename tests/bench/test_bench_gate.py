"""Laws of the gate: nothing gets a time that does not compute what the reference computes."""

import dataclasses
import math

import pytest
import torch
from bench_cases import answering, toy_case

from anymamba.bench import SMALL as BLOCKS
from anymamba.bench import Effort, Way, backward, block_cases, lm_case, measure
from anymamba.errors import BackendError
from anymamba.models import MambaConfig, MambaLM

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


def test_half_types_may_stray_as_far_as_the_reference_does():
    """Both roundings are measured from float32, and twice the reference's own is allowed."""
    ways = {
        "exact": Way(answering(1, 1, 1)),
        "reference": Way(answering(1, 1, 0.95)),
        "native": Way(answering(1, 1, 1.1)),
        "portable": Way(answering(1, 1, 1.3)),
    }
    near, far = measure(toy_case(ways, dtype=torch.bfloat16), EFFORT)
    assert near.ok
    assert near.timing
    assert not far.ok
    assert far.error == pytest.approx(0.3)
    assert far.limit == near.limit == pytest.approx(0.02 + 2 * 0.05)


def test_a_reference_without_a_result_excuses_nobody():
    """However far it strays, half of the largest value is too far for the others."""
    ways = {
        "exact": Way(answering(1, 1, 1)),
        "reference": Way(answering(1, 1, math.nan)),
        "native": Way(answering(1, 1, math.nan)),
        "portable": Way(answering(1, 1, 1.6)),
    }
    assert not any(row.ok for row in measure(toy_case(ways, dtype=torch.bfloat16), EFFORT))


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba3"])
def test_a_wrong_formula_is_told_from_rounding(layer):
    """Autocast training of a stack: a layer that forgets its skip is red, rounding is not."""
    config = MambaConfig(d_model=64, n_layer=4, vocab_size=50, ssm_cfg={"layer": layer})
    case = lm_case("toy", 12, "train", config, dtype=torch.bfloat16)
    torch.manual_seed(0)
    lm = MambaLM(config)
    weights = [weight for _, weight in sorted(lm.named_parameters())]
    # Those of the case.
    ids_bs = torch.randint(50, (1, 12), generator=torch.Generator().manual_seed(1))

    def step() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = lm.loss(ids_bs, impl="portable")
        return [loss, *torch.autograd.grad(loss, weights)]

    def ways_at(length: int) -> dict[str, Way | str]:
        judges = {name: case.prepare()(length)[name] for name in ("reference", "exact")}
        return {**judges, "portable": Way(step)}

    judged = dataclasses.replace(case, prepare=lambda: ways_at)
    [rounded] = measure(judged, EFFORT)
    assert rounded.ok, rounded
    with torch.no_grad():
        lm.backbone.layers[1].mixer.D.zero_()
    [wrong] = measure(judged, EFFORT)
    assert not wrong.ok


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
