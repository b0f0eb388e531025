"""The tools that print what narrow weights cost, on models so small that they cost nothing."""

import re

import pytest

import measure_latency
import measure_quantization
from anymamba.models import quantize_lm, scheme_of
from decoder_cases import model
from kernels import DECODERS


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_the_speed_of_reading_prompts_is_printed(scheme, capsys, monkeypatch):
    """A line for each length: as generation reads it, and by the modules at once."""
    monkeypatch.setattr(measure_latency, "PROMPTS", (1, 40))
    lm = model("mamba2")
    measure_latency.print_prompts(lm if scheme is None else quantize_lm(lm, scheme))
    lines = capsys.readouterr().out.splitlines()
    figures = [re.findall(r"\d+(?:\.\d+)?", line) for line in lines]
    assert [line[0] for line in figures] == ["1", "40"]
    assert all(len(line) == 4 and float(line[2]) > 0 for line in figures)


@pytest.mark.skipif(not DECODERS, reason="no compiled kernels")
def test_every_format_of_the_decoder_is_measured(capsys, monkeypatch):
    """The goldens' logits have an error in each of them, float16 between float32 and bfloat16."""
    assert set(measure_quantization.FORMATS) == {"float32", "bfloat16", "float16", "int8", "int4"}
    first = next(measure_quantization.golden_models())
    monkeypatch.setattr(measure_quantization, "golden_models", lambda: iter([first]))
    measure_quantization.print_goldens()
    head, line = capsys.readouterr().out.splitlines()
    formats = head.split()[-len(measure_quantization.FORMATS) :]
    errors = dict(zip(formats, map(float, line.split()[-len(formats) :]), strict=True))
    assert errors["float32"] < errors["float16"] < errors["bfloat16"] < errors["int4"]


@pytest.mark.parametrize("form", measure_quantization.FORMATS)
def test_a_format_is_what_it_says(form):
    """Weights have the dtype or the scheme of their name, and every format has a promise."""
    _, folder, activation = next(measure_quantization.golden_models())
    lm = measure_quantization.load_as(form, folder, activation)
    found = scheme_of(lm) or str(lm.lm_head.weight.dtype).removeprefix("torch.")
    assert found == form
    assert form == "float32" or measure_quantization.PROMISED[form] > 0
