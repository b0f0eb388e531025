"""Laws of what a run leaves behind: metrics that survive a kill, curves, a page."""

import json
import math

import pytest

from anymamba.errors import CheckpointError
from anymamba.train import MetricsFile, draw_curves, read_metrics, write_report


def entry(step: int, kind: str = "step", **facts) -> dict:
    """Return an entry of the metrics."""
    return {"kind": kind, "step": step, "bits_per_byte": 8 / (1 + step), **facts}


def written(file, steps, keep_until=None) -> None:
    """Write entries of these steps."""
    metrics = MetricsFile(file, keep_until)
    for step in steps:
        metrics.write(entry(step))
    metrics.close()


def test_every_value_comes_back_to_the_last_bit(tmp_path):
    """Floats survive; NaN and infinities, for which JSON has no number, become words."""
    file = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(file, None)
    metrics.write(entry(1, loss=0.1 + 0.2, tiny=5e-324, bad=math.nan))
    # On the disk's side before `close`: a kill must not lose it.
    [found] = read_metrics(file)
    metrics.close()
    assert found == entry(1, loss=0.1 + 0.2, tiny=5e-324, bad="nan")
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_a_resumed_run_writes_the_rest_anew(tmp_path):
    """Entries after the checkpoint go, those before stay, and nothing is there twice."""
    file = tmp_path / "metrics.jsonl"
    written(file, range(1, 9))
    written(file, range(6, 11), keep_until=5)
    assert [e["step"] for e in read_metrics(file)] == list(range(1, 11))
    written(file, [1])
    assert [e["step"] for e in read_metrics(file)] == [1]


def test_half_a_line_does_not_count(tmp_path):
    """What a kill cut off is dropped, also when it happens to be valid JSON."""
    file = tmp_path / "metrics.jsonl"
    written(file, [1, 2])
    with open(file, "a") as stream:
        stream.write('{"kind": "step", "step": 3}')
    assert [e["step"] for e in read_metrics(file)] == [1, 2]
    written(file, [3], keep_until=2)
    assert [e["step"] for e in read_metrics(file)] == [1, 2, 3]


def test_damage_in_the_middle_is_refused(tmp_path):
    """A line that is not JSON is named by its number."""
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"kind": "step", "step": 1}\nrubbish\n{"kind": "step", "step": 2}\n')
    with pytest.raises(CheckpointError, match="line 2"):
        read_metrics(file)


@pytest.mark.parametrize("steps", [0, 1, 2, 500])
def test_curves_are_drawn_from_any_number_of_points(tmp_path, steps):
    """A short run has a picture too."""
    entries = [entry(step) for step in range(steps)]
    entries += [entry(steps, "valid"), entry(steps, "step", bits_per_byte="nan")]
    draw_curves(entries, tmp_path / "loss.png", "a title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_the_report_holds_config_curve_and_samples(tmp_path):
    """The page shows what was trained, how it went and what was written, fences included."""
    fence = "```"
    entries = [
        entry(5, "valid", of_all=False),
        entry(7, "valid", of_all=True),
        entry(6, "skip", why="the loss is nan"),
        entry(9, "sample", prompt="def ", text=f"f():\n{fence}\nnot a fence"),
    ]
    file = tmp_path / "report.md"
    write_report(file, entries, "[optim]\nlr = 0.5", {"parameters": "1,234"})
    text = file.read_text()
    for promise in (
        "| parameters | 1,234 |",
        "![loss](loss.png)",
        "## Held out, a part of it\n\n| step | bits per byte |\n|---:|---:|\n| 5 | 1.3333 |\n\n",
        "## Held out, all of it\n\n| step | bits per byte |\n|---:|---:|\n| 7 | 1.0000 |\n\n",
        "step 6: the loss is nan",
        "def f():",
        "lr = 0.5",
    ):
        assert promise in text
    # The sample's own fence must not end its block.
    assert text.count("````") == 2
