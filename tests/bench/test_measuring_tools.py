"""The tools that print what decoding costs, on models so small that they cost nothing."""

import json
import re

import pytest

import compare_memories
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


def run_of_the_bench(rates: dict[int, float], reached: dict[int, float]) -> dict:
    """Return the report of a run in which one row and eight met memory at these rates."""
    measures = {1: "share of the ideal", 8: "speed over one row"}
    return {
        "decoding": [
            {"engine": who, "model": "m", "format": "f", "rows": rows, "bandwidth": rate * factor}
            for rows, rate in rates.items()
            for who, factor in (("anymamba", 1e9), ("llama.cpp", 1e12))
        ],
        "budget": [
            {
                "what": f"m, f, decoding {rows}",
                "measure": measures[rows],
                "sign": ">=",
                "target": {1: 0.9, 8: 4.0}[rows],
                "reached": value,
            }
            for rows, value in reached.items()
        ],
    }


def test_lines_are_told_apart_by_their_memory(tmp_path, capsys, monkeypatch):
    """Each line at the memory of its own case; one row beside other memory is no comparison.

    A report that was saved has the run among those of other groups.
    """
    runs = [
        run_of_the_bench({1: 35.0, 8: 36.0}, {1: 0.95, 8: 6.0}),
        run_of_the_bench({1: 33.0, 8: 66.0}, {1: 0.97, 8: 5.0}),
        {"sections": {"decode": run_of_the_bench({1: 64.0, 8: 65.0}, {1: 0.80, 8: 3.5})}},
    ]
    files = [tmp_path / f"{place}.json" for place in range(3)]
    for file, run in zip(files, runs, strict=True):
        file.write_text(json.dumps(run))
    monkeypatch.setattr("sys.argv", ["compare_memories.py", *map(str, files)])
    compare_memories.main()
    slow, fast, _, one, eight = capsys.readouterr().out.splitlines()
    assert (slow, fast) == ("slow: 33 to 36 GB/s", "fast: 64 to 66 GB/s")
    assert "96% (2)" in one
    assert one.endswith("80% (1) missed")
    assert "6.00x (1)" in eight
    assert eight.endswith("3.50x (1) missed")
