"""The bench of decoding: what it counts and promises, and that a wrong decoder has no speed."""

import pytest
import torch

from anymamba.bench import Decoding, Rates, decode_figures, decode_promises, stored_bytes
from anymamba.models import MambaConfig, MambaLM, quantize_lm
from kernels import NATIVE

TINY = MambaConfig(d_model=32, n_layer=2, vocab_size=50, ssm_cfg={"layer": "Mamba2", "headdim": 8})


def figure(rows: int = 1, form: str = "float32", seconds: float = 1.0, **more):
    """Return a figure that reads 8 bytes of weights and has 1 byte of state per row."""
    more = {"model": "tiny", "error": 0.0, **more}
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
    rates = Rates([torch.float32], read_bytes=2**20)
    rates.reads[:] = [10.0]
    found = decode_promises([figure(), figure(8, seconds=1.5), figure(8, "int8")], rates)
    assert [promise.reached for promise in found] == [1.0, 8 / 1.5, 2.4]
    assert [promise.target for promise in found] == [0.9, 4.0, 0.7]


def test_a_wrong_decoder_meets_no_promise():
    """Logits that differ from the modules' leave nothing to compare."""
    rates = Rates([torch.float32], read_bytes=2**20)
    assert [promise.reached for promise in decode_promises([figure(error=0.1)], rates)] == [None]


def test_the_budget_compares_with_llama():
    """One row of Mamba-1 and Mamba-2, each format with its own target; unmeasured is not met."""
    rates = Rates([torch.float32], read_bytes=2**20)
    ours, theirs = (
        figure(form="int8", seconds=seconds, model="mamba2-130m", engine=engine)
        for engine, seconds in (("anymamba", 1.0), ("llama.cpp", 1.3))
    )
    lines = {p.measure: p for p in decode_promises([ours, theirs], rates)}
    over = lines["speed over llama.cpp"]
    assert (over.target, over.reached, over.met) == (1.2, 1.3, True)
    [_, alone] = decode_promises([ours], rates)
    assert (alone.reached, alone.met) == (None, False)
    assert "did not run" in alone.why_not
    assert [p.measure for p in decode_promises([figure(), theirs], rates)] == ["share of the ideal"]


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
