"""The bench of decoding: what it counts and promises, and that a wrong decoder has no speed."""

import sys

import pytest
import torch
from bench_cases import tiny_report

from anymamba.bench import (
    Decoding,
    budget_table,
    decode_figures,
    decode_promises,
    stored_bytes,
    tables,
)
from anymamba.errors import BackendError
from anymamba.models import MambaConfig, MambaLM, quantize_lm
from kernels import NATIVE

# The clock and the engines are not offered to others; here they are replaced.
bench_decode = sys.modules[decode_figures.__module__]
TINY = MambaConfig(d_model=32, n_layer=2, vocab_size=50, ssm_cfg={"layer": "Mamba2", "headdim": 8})


def figure(rows: int = 1, form: str = "float32", seconds: float = 1.0, **more):
    """Return a figure that reads 8 bytes of weights and has 1 byte of state per row."""
    more = {"model": "tiny", "rates": [10.0], **more}
    return Decoding(
        format=form, rows=rows, seconds=[seconds], weight_bytes=8, state_bytes=rows, **more
    )


def test_every_stored_byte_is_counted_once():
    """A tied head is one table; integers count with their scales."""
    plain = MambaLM(TINY)
    assert stored_bytes(plain) == sum(4 * p.numel() for p in plain.parameters())
    whole = stored_bytes(plain)
    assert stored_bytes(quantize_lm(plain, "int4")) < whole / 3


def test_the_budget_knows_one_row_and_eight():
    """Shares for one row and for eight integers, the gain over one row for float32."""
    found = decode_promises([figure(), figure(8, seconds=1.5), figure(8, "int8")])
    assert [promise.reached for promise in found] == [1.0, 8 / 1.5, 2.4]
    assert [promise.target for promise in found] == [0.9, 4.0, 0.7]


def test_a_wrong_decoder_meets_no_promise():
    """Logits that differ from the modules' leave nothing to compare."""
    assert [promise.reached for promise in decode_promises([figure(error=0.1)])] == [None]


def test_the_budget_compares_with_llama():
    """One row of Mamba-1 and Mamba-2, each format with its own target; unmeasured is not met."""
    ours, theirs = (
        figure(form="int8", seconds=seconds, model="mamba2-130m", engine=engine)
        for engine, seconds in (("anymamba", 1.0), ("llama.cpp", 1.3))
    )
    lines = {p.measure: p for p in decode_promises([ours, theirs])}
    over = lines["speed over llama.cpp"]
    assert (over.target, over.reached, over.met) == (1.2, 1.3, True)
    absent = theirs._replace(seconds=(), why_not="it is not here")
    [_, alone] = decode_promises([ours, absent])
    assert (alone.reached, alone.met, alone.why_not) == (None, False, "it is not here")
    assert [p.measure for p in decode_promises([figure(), theirs])] == ["share of the ideal"]


def test_a_share_is_the_same_wherever_it_is_printed():
    """Each row brings the rate that was read between its tokens; later probes change nothing."""
    report = tiny_report(decoding=[figure(seconds=1.25)])
    report.rates.reads[:] = [1e9]
    [table] = tables(report)
    assert table.columns[-1] == "ideal"
    assert table.rows[0][-1] == "80%"
    assert budget_table(report.promises).rows[0][-1] == "80%"
    assert report.to_dict()["decoding"][0]["share_of_ideal"] == 0.8


@pytest.fixture
def engine(monkeypatch):
    """Return a function that puts another decoder in the place of ours."""

    def replace_ours(step):
        def make(lm, rows):
            state = {"cache": lm.empty_cache(rows)}
            return bench_decode._Engine(lambda ids_b: step(lm, ids_b, state), lm, stored_bytes(lm))

        monkeypatch.setattr(bench_decode, "_our_engine", make)
        monkeypatch.setattr(bench_decode, "array_to_read", lambda: torch.ones(8))

    return replace_ours


def portable_step(lm, ids_b, state):
    logits_bw, state["cache"] = lm.step(ids_b, state["cache"])
    return logits_bw


def measured(formats=bench_decode.FORMATS, rows=(1, 2), tokens=1):
    pairs = decode_figures(["tiny"], formats, rows, tokens=tokens, configs={"tiny": TINY})
    return [pair[0] for pair in pairs]


def test_the_gate_sees_what_a_decoder_remembers(engine):
    """One that forgets its state is right at the first token, and wrong after a few."""
    engine(portable_step)
    assert all(one.ok for one in measured())
    engine(lambda lm, ids_b, state: lm.step(ids_b, lm.empty_cache(len(ids_b)))[0])
    assert not any(one.ok for one in measured())


def test_memory_is_read_between_the_tokens(engine, monkeypatch):
    """Before the first turn and after each: a token is held to the memory of its own moment."""
    order = []

    def step(lm, ids_b, state):
        order.append("token")
        return portable_step(lm, ids_b, state)

    def read(array):
        order.append("read")
        return float(len(order))

    engine(step)
    monkeypatch.setattr(bench_decode, "read_rate", read)
    # Where llama.cpp is installed it would take turns of its own.
    monkeypatch.setattr(bench_decode, "_llama_engine", lambda *_: "it is not here")
    [one] = measured(["float32"], [1], tokens=12)
    gate, turn, rest = (["token"] * count for count in (4, 11, 3))
    assert order == [*gate, "read", *turn, "read", *rest, "read"]
    first, middle, last = (place + 1 for place, what in enumerate(order) if what == "read")
    assert one.rates == [(first + middle) / 2] * 10 + [(middle + last) / 2] * 2


def test_each_engine_has_the_memory_of_its_own_turn(engine, monkeypatch):
    """The rate is read between two engines as well: each is held to what was read around it."""
    rates = iter([1.0, 3.0, 9.0])
    engine(portable_step)
    other = bench_decode._our_engine
    monkeypatch.setattr(bench_decode, "_llama_engine", lambda files, lm, *_: other(lm, 1))
    monkeypatch.setattr(bench_decode, "read_rate", lambda array: next(rates))
    [pair] = decode_figures(["tiny"], ["float32"], [1], tokens=2, configs={"tiny": TINY})
    assert [one.rates for one in pair] == [[2.0, 2.0], [6.0, 6.0]]


def test_a_share_is_that_of_each_token():
    """Memory that is twice as fast for half of the tokens, which then are too, changes no share."""
    even = figure(seconds=2.0)
    turned = even._replace(seconds=[2.0, 1.0, 2.0, 1.0], rates=[10.0, 20.0, 10.0, 20.0])
    assert turned.share == even.share
    assert turned.median != even.median


def test_who_cannot_run_says_why_and_the_others_go_on(engine):
    """A refusal costs one row, in the table and in the budget; and is nothing wrong."""

    def refuse(lm, ids_b, state):
        if len(ids_b) == 1:
            raise BackendError("MambaLM: impl='native' cannot serve this token: no room. Wait.")
        return portable_step(lm, ids_b, state)

    engine(refuse)
    found = measured(["float32", "int8"], [1, 8])
    assert [(x.rows, x.has_speed, x.why_not) for x in found] == [
        (1, False, "no room"),
        (8, True, ""),
    ] * 2
    report = tiny_report(decoding=found)
    assert report.wrong == []
    assert [x["seconds"] is None for x in report.to_dict()["decoding"]] == [True, False] * 2
    [table] = tables(report)
    assert [row[4] == "-" for row in table.rows] == [True, False] * 2
    assert "anymamba: no room (tiny)." in table.notes
    lines = {(p.what, p.measure): p for p in report.promises}
    for form, measure in (("float32", "speed over one row"), ("int8", "share of the ideal")):
        assert lines[f"tiny, {form}, decoding 1", "share of the ideal"].why_not == "no room"
        assert (lines[f"tiny, {form}, decoding 8", measure].reached is None) == (form == "float32")


def test_a_peer_that_cannot_be_loaded_costs_its_own_rows_only(engine, monkeypatch):
    """Ours is measured beside the reason, in every format that follows too."""

    class Files(bench_decode.LlamaFiles):
        def __init__(self):
            """Write nothing."""

        def open(self, form, *, rows=1):
            raise BackendError(f"bench: llama.cpp could not convert the model to {form}.")

    engine(portable_step)
    monkeypatch.setattr(bench_decode, "llama_files", lambda lm: Files())
    pairs = list(decode_figures(["tiny"], rows=[1], tokens=1, configs={"tiny": TINY}))
    assert [(ours.has_speed, theirs.why_not) for ours, theirs in pairs] == [
        (True, f"llama.cpp could not convert the model to {form}") for form in bench_decode.FORMATS
    ]


@pytest.mark.skipif(not NATIVE, reason="no compiled kernels")
def test_every_format_is_measured():
    """Tiny models decode in all formats, rightly, and every number is there."""
    pairs = decode_figures(["tiny"], rows=(1, 2), tokens=3, configs={"tiny": TINY})
    found = [pair[0] for pair in pairs]
    assert [(x.format, x.rows) for x in found] == [
        (form, rows) for form in ("float32", "bfloat16", "int8", "int4") for rows in (1, 2)
    ]
    for one in found:
        assert one.ok, one.error
        assert len(one.seconds) == 3
        assert one.tail >= 1
        assert one.bytes_per_token * one.rows == one.weight_bytes + 2 * one.state_bytes
