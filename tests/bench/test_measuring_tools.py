"""The tools that print what narrow weights cost, on models so small that they cost nothing."""

import re

import pytest

import measure_latency
from anymamba.models import quantize_lm
from decoder_cases import model


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
