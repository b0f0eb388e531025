"""The bench of decoding: what it counts and promises, and that a wrong decoder has no speed."""

import pytest
import torch

from anymamba.bench import Decoding, Rates, decode_figures, decode_promises, stored_bytes
from anymamba.models import MambaConfig, MambaLM, quantize_lm
from kernels import NATIVE

TINY = MambaConfig(d_model=32, n_layer=2, vocab_size=50, ssm_cfg={"layer": "Mamba2", "headdim": 8})


def figure(rows: int = 1, form: str = "float32", seconds: float = 1.0, error: float = 0.0):
    """Return a figure that reads 8 bytes of weights and has 1 byte of state per row."""
    return Decoding("tiny", form, rows, [seconds], 8, rows, error)


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


@pytest.mark.skipif(not NATIVE, reason="no compiled kernels")
def test_every_format_is_measured():
    """Tiny models decode in all formats, rightly, and every number is there."""
    found = decode_figures(["tiny"], rows=(1, 2), tokens=3, configs={"tiny": TINY})
    assert [(x.format, x.rows) for x in found] == [
        (form, rows) for form in ("float32", "bfloat16", "int8", "int4") for rows in (1, 2)
    ]
    for one in found:
        assert one.ok, one.error
        assert len(one.seconds) == 3
        assert one.tail >= 1
        assert one.bytes_per_token * one.rows == one.weight_bytes + 2 * one.state_bytes
