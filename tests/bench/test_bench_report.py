"""Laws of the report: budget, tables, page, picture, data, and the command that makes them."""

import json
from dataclasses import replace

import pytest
import torch
from bench_cases import answering, tiny_report, toy_case

from anymamba.bench import (
    GROUPS,
    MODES,
    Growth,
    Row,
    Suite,
    Threads,
    Timing,
    add_section,
    budget_table,
    draw,
    page,
    promises,
    read_sections,
    run_suite,
    section,
    tables,
)
from anymamba.bench import Way as TimedWay
from anymamba.cli import main


def row(
    name, mode, way, seconds, *, group="core", peak=0, results=0, why_not=None, dtype=torch.float32
):
    """Return a measured row, or one with a reason."""
    case = replace(toy_case({}, name=name, mode=mode, group=group), dtype=dtype)
    timing = None if seconds is None else Timing(seconds, seconds, seconds, 3)
    return Row(case, way, error=0.0, why_not=why_not, timing=timing, peak=peak, results=results)


def budget_of(rows, growth=(), threads=(), mm=1000.0):
    report = tiny_report()
    for dtype in (torch.float32, torch.bfloat16):
        report.rates.products[dtype] = [mm]
    found = promises(rows, growth, threads, report.rates)
    return {(p.what, p.measure): p for p in found}


def test_the_core_is_held_to_its_budget():
    """3x portable and 65% of mm forward; 3x serial and lean intermediates in training."""
    rows = [
        row("SSD", "forward", "native", 1.25),
        row("SSD", "forward", "portable", 5.0),
        row("SSD", "forward", "serial", 6.0),
        row("SSD", "train", "native", 2.0, peak=70, results=30),
        row("SSD", "train", "portable", 5.0),
        row("SSD", "train", "serial", 4.0, peak=230, results=30),
    ]
    found = budget_of(rows)
    speed = found["SSD, forward", "speed over the portable path"]
    assert (speed.target, speed.reached, speed.met) == (3.0, 4.0, True)
    share = found["SSD, forward", "share of mm"]  # 1000 FLOP at 1000 per second: one second
    assert (share.target, share.reached, share.met) == (0.65, 0.8, True)
    slow = found["SSD, train", "speed over autograd over serial"]
    assert (slow.target, slow.reached, slow.met) == (3.0, 2.0, False)
    lean = found["SSD, train", "intermediates over inputs"]
    assert (lean.target, lean.reached, lean.met) == (0.5, 0.4, True)
    serial = found["SSD, train", "intermediates over those of serial"]
    assert (serial.target, serial.reached, serial.met) == (0.35, 0.2, True)


def test_the_baseline_of_the_core_is_the_faster_of_its_portable_columns():
    """Autograd over serial is a portable path too, and may turn out the fastest of all."""
    times = {"native": 1.0, "portable": 4.0, "serial": 2.0}
    rows = [row("SSD", "forward", way, seconds) for way, seconds in times.items()]
    speed = budget_of(rows)["SSD, forward", "speed over the portable path"]
    assert (speed.reached, speed.met) == (2.0, False)


def test_the_scan_is_held_to_twelve_loops():
    """Forward and backward each."""
    rows = [
        row("scan", mode, way, seconds, group="scan")
        for mode, times in (("forward", (1.0, 3.0, 12.0)), ("train", (1.0, 3.0, 11.9)))
        for way, seconds in zip(("native", "portable", "unbind"), times, strict=True)
    ]
    found = budget_of(rows)
    assert found["scan, forward", "speed over the loop over unbind"].met
    assert not found["scan, train", "speed over the loop over unbind"].met


def test_blocks_and_models_are_held_to_the_ideal_and_to_siso():
    """SISO 1.3 and 1.6 times the ideal, relatives 1.5 times SISO, models 1.6, and transformers."""
    rows = [
        row("Mamba-3 SISO b1", "forward", "native", 1.25, group="blocks"),
        row("Mamba-3 double b1", "forward", "native", 2.5, group="blocks"),
        row("Mamba-3 SISO b1", "train", "native", 1.61, group="blocks"),
        row("mamba2-130m b1", "forward", "native", 1.31, group="prefill"),
        row("mamba2-130m b1", "forward", "llama.cpp", 2.62, group="prefill"),
        row("mamba2-130m b1", "train", "native", 2.0, group="train"),
        row("mamba2-130m b1", "train", "transformers", 3.0, group="train"),
    ]
    found = budget_of(rows)
    assert found["Mamba-3 SISO b1, forward", "time over ideal"].met
    assert not found["Mamba-3 SISO b1, train", "time over ideal"].met
    assert found["Mamba-3 double b1, forward", "time per work over SISO's"].reached == 2.0
    assert not found["Mamba-3 double b1, forward", "time per work over SISO's"].met
    assert not found["mamba2-130m b1, forward", "time over ideal"].met
    assert found["mamba2-130m b1, forward", "speed over llama.cpp"].reached == 2.0
    assert not found["mamba2-130m b1, train", "time over ideal"].met
    assert found["mamba2-130m b1, train", "speed over transformers"].reached == 1.5


def test_half_types_have_their_own_lines():
    """1.5 times the ideal and 1.35 times llama.cpp in bfloat16; autocast beside float32."""
    narrow = {"dtype": torch.bfloat16}
    rows = [
        row("mamba2-130m b1", "forward", "native", 1.45, group="prefill", **narrow),
        row("mamba2-130m b1", "forward", "llama.cpp", 1.45, group="prefill", **narrow),
        row("mamba-130m b1", "train", "native", 3.0, group="train"),
        row("mamba-130m b1", "train", "transformers", 30.0, group="train"),
        row("mamba-130m b1", "train", "native", 1.5, group="train", **narrow),
        row("mamba-130m b1", "train", "transformers", None, group="train", **narrow),
    ]
    found = budget_of(rows)
    assert found["mamba2-130m b1 bfloat16, forward", "time over ideal"].met
    over = found["mamba2-130m b1 bfloat16, forward", "speed over llama.cpp"]
    assert (over.target, over.reached, over.met) == (1.35, 1.0, False)
    assert found["mamba-130m b1, train", "speed over transformers"].target == 12.0
    assert found["mamba-130m b1 bfloat16, train", "speed over float32"].reached == 2.0


def test_a_peer_is_compared_where_it_can_run():
    """The ideal is for the longest step; the peer's line is for the step it was measured on."""
    rows = [
        row("mamba-130m s64", "train", "native", 1.0, group="train"),
        row("mamba-130m s64", "train", "transformers", 13.0, group="train"),
        row("mamba-130m s256", "train", "native", 1.5, group="train"),
        row("mamba-130m s256", "train", "transformers", None, group="train", why_not="no room"),
    ]
    rows = [r._replace(case=replace(r.case, length=int(r.case.name[12:]))) for r in rows]
    found = budget_of(rows)
    assert found["mamba-130m s64, train", "speed over transformers"].met
    assert list(found) == [
        ("mamba-130m s256, train", "time over ideal"),
        ("mamba-130m s64, train", "speed over transformers"),
    ]
    [_, alone] = budget_of(rows[2:]).values()
    assert (alone.reached, alone.why_not) == (None, "no room")


def test_prompts_are_judged_at_the_longest_only():
    """Short prompts are shown, and promised nothing."""
    rows = [
        row(f"mamba3-siso-187m s{length}", "forward", "native", 1.0, group="prefill")
        for length in (256, 2048)
    ]
    rows = [
        r._replace(case=replace(r.case, length=n)) for r, n in zip(rows, (256, 2048), strict=True)
    ]
    assert [what for what, _ in budget_of(rows)] == ["mamba3-siso-187m s2048, forward"]


def test_flatness_and_threads_are_in_the_budget():
    """Ten percent over the lengths, 1.7 from two threads."""
    growth = [Growth("core", "forward", "native", {1024: 0.9, 65536: 1.1})]
    threads = [Threads("core", "forward", "native", {1: 3.0, 2: 2.0}, {1: 3.2, 2: 2.0})]
    found = budget_of([], growth, threads)
    flat = found["core, forward (native)", "time per token, deviation over lengths"]
    assert flat.reached == pytest.approx(0.1)
    assert not found["core, forward (native)", "2 threads over 1"].met


def test_what_was_not_measured_is_not_met_and_says_why():
    """A missing kernel is not hidden."""
    rows = [
        row("SSD", "forward", "native", None, why_not="no kernel here"),
        row("SSD", "forward", "portable", 5.0),
        row("SSD", "forward", "serial", 6.0),
    ]
    promise = budget_of(rows)["SSD, forward", "speed over the portable path"]
    assert (promise.reached, promise.met, promise.why_not) == (None, False, "no kernel here")
    text = page({"core": section(tiny_report(rows=rows), "anymamba bench core")})
    assert "not met" in text
    assert "no kernel here" in text


def full_report():
    """Return a report with a row of every kind; the ways of a case share it."""
    rows = [
        row("SSD", "forward", way, seconds, peak=2_500_000)
        for way, seconds in (("native", 0.001), ("portable", 0.004), ("serial", 0.005))
    ]
    rows = [r._replace(case=rows[0].case) for r in rows]
    rows.append(row("SSD", "train", "native", None, why_not="no | kernel"))
    rows.append(row("SSD", "train", "portable", 1234.0)._replace(note="a|b"))
    rows.append(row("SSD", "train", "serial", 2.0))
    growth = [Growth("core", "forward", "native", {1024: 1e-6, 2048: 1.2e-6})]
    threads = [Threads("core", "forward", "native", {1: 3.0, 2: 2.0}, {1: 3.2, 2: 2.0})]
    return tiny_report(rows=rows, growth=growth, threads=threads)


def test_the_page_names_the_machine_and_holds_every_number():
    """Median, spread, tokens per second, memory, ideal, gain; and the columns side by side."""
    report = full_report()
    text = page({"core": section(report, "anymamba bench core")}, plot="p.png")
    assert report.machine.cpu in text
    assert f"torch {torch.__version__}" in " ".join(text.split())
    assert "`anymamba bench core`" in text
    assert "![Speed and share of the ideal](p.png)" in text
    line = next(x for x in text.splitlines() if x.startswith("| SSD | forward | native |"))
    assert "1 ms | 0% | 6 k | 2.5 MB |" in line
    assert line.endswith("| 4x |")
    assert "| SSD | forward | 1 | 4 | 5 |" in text
    assert "| 3000 ms | 2000 ms | 1.50x | 1.60x |" in text
    assert "1234000" in text
    widths = {
        line.replace("\\|", "").count("|")
        for table in text.split("## ")[3:4]
        for line in table.splitlines()
        if line.startswith("|")
    }
    assert len(widths) == 1


def test_the_data_is_json_and_complete():
    """Every row is there, infinities are words."""
    report = full_report()
    report.rows[0] = report.rows[0]._replace(error=float("inf"), ok=False)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert len(data["rows"]) == len(report.rows)
    assert data["rows"][0]["error"] == "inf"
    assert data["rows"][0]["over_portable"] == 4.0
    assert data["rows"][3]["seconds"] is None
    assert data["machine"]["torch"] == torch.__version__
    assert [entry["met"] for entry in data["budget"]] == [p.met for p in report.promises]


def test_the_picture_is_a_png(tmp_path):
    """With and without the lengths."""
    pytest.importorskip("matplotlib")
    for name, report in (("a", full_report()), ("b", tiny_report(rows=full_report().rows))):
        draw({"core": section(report, "anymamba bench core")}, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def bench(monkeypatch, capsys):
    """Return a function that runs `anymamba bench` on toy cases."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("anymamba.bench.suite.Rates", lambda dtypes: tiny_report().rates)

    def run(ways, *arguments):
        monkeypatch.setattr(
            "anymamba.bench.suite.suite_cases", lambda suite: iter([toy_case(ways)])
        )
        code = main(["bench", "core", "--quick", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


WAYS = {way: TimedWay(answering(1, 1, 1)) for way in ("native", "portable", "serial")}


def test_the_command_prints_and_writes(bench, tmp_path, memory_settings):
    """Tables in 80 columns; page, picture and data beside each other; exit code 0."""
    pytest.importorskip("matplotlib")
    code, out, err = bench(WAYS, "--save", tmp_path / "my.bench")
    assert code == 0, err
    assert memory_settings == [True]
    assert max(map(len, out.splitlines())) <= 80
    assert "Every way that was timed agrees" in out
    found = {file.name for file in tmp_path.iterdir()}
    assert found == {"my.bench.md", "my.bench.png", "my.bench.json"}
    assert "(my.bench.png)" in (tmp_path / "my.bench.md").read_text()
    assert read_sections(tmp_path / "my.bench.json")["core"]["quick"] is True


def test_a_later_run_replaces_what_it_measured_and_keeps_the_rest(bench, tmp_path):
    """A page of many minutes can be measured in pieces; each names its own command."""
    pytest.importorskip("matplotlib")
    assert bench(WAYS, "--save", tmp_path / "x")[0] == 0
    data = tmp_path / "x.json"
    sections = json.loads(data.read_text())
    old = {**sections["sections"]["core"], "command": "anymamba bench scan"}
    old["tables"] = [{**table, "title": "An older table"} for table in old["tables"]]
    data.write_text(json.dumps({"sections": {"scan": old, **sections["sections"]}}))
    assert bench({**WAYS, "serial": "no such thing"}, "--save", tmp_path / "x")[0] == 0
    assert list(read_sections(data)) == ["core", "scan"]
    text = (tmp_path / "x.md").read_text()
    assert "An older table" in text
    assert "no such thing" in text
    assert text.count("`anymamba bench core --quick`") == 1
    assert text.count("`anymamba bench scan`") == 1


def test_a_strange_file_is_refused_before_measuring(bench, tmp_path):
    """Nothing is overwritten that --save did not write."""
    (tmp_path / "x.json").write_text('{"rows": []}')
    code, _, err = bench(WAYS, "--save", tmp_path / "x")
    assert code == 2
    assert "Move it away" in err
    assert (tmp_path / "x.json").read_text() == '{"rows": []}'


def test_an_interruption_costs_nothing_that_was_measured(monkeypatch):
    """Rows are shown and handed over when they are measured."""
    shown, kept = [], []

    def stop():
        raise KeyboardInterrupt

    cases = [toy_case(WAYS), toy_case({**WAYS, "native": TimedWay(stop)}, name="second")]
    monkeypatch.setattr("anymamba.bench.suite.Rates", lambda dtypes: tiny_report().rates)
    monkeypatch.setattr("anymamba.bench.suite.suite_cases", lambda suite: iter(cases))

    def keep(group, found, is_complete):
        kept.append((group, len(found.rows), is_complete))

    with pytest.raises(KeyboardInterrupt):
        run_suite(Suite(groups=["core"], quick=True), show=shown.append, keep=keep)
    assert [row.way for row in shown[0].rows] == list(WAYS)
    assert kept == [("core", 3, False)]


def test_what_is_complete_is_not_replaced_by_a_part(tmp_path):
    """A part is kept where there was nothing, says so, and gives way to the whole."""
    file = tmp_path / "x.json"
    part = section(full_report(), "part", is_complete=False)
    whole = section(full_report(), "whole")
    assert "interrupted" in page(add_section("core", part, file))
    assert add_section("core", whole, file)["core"]["command"] == "whole"
    assert add_section("core", part, file)["core"]["command"] == "whole"
    assert "interrupted" not in page(read_sections(file))


def test_a_red_gate_is_exit_code_1_without_a_speed(bench):
    """The wrong way is named; its time is not printed."""
    ways = {**WAYS, "native": TimedWay(answering(1, 1, 2))}
    code, out, _ = bench(ways)
    assert code == 1
    [line] = [x for x in out.splitlines() if "native" in x and "WRONG" in x and "(" not in x]
    assert "ms" not in line
    code, out, _ = bench(ways, "--json")
    assert code == 1
    document = json.loads(out)
    assert document["ok"] is False
    assert document["rows"][0]["seconds"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], "--threads"),
        (["--seconds", "-1"], "--seconds"),
        (["--save", "no/such/folder/x"], "must exist"),
    ],
)
def test_mistakes_are_met_before_measuring(bench, arguments, message):
    """Nothing is measured for minutes only to fail at the end."""
    code, _, err = bench({}, *arguments)
    assert code == 2
    assert message in err


def test_the_command_knows_every_table_and_mode(capsys):
    """Its help names what the room offers."""
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*GROUPS, *MODES, "--json"))
    for group in GROUPS:
        assert main(["bench", group, "--threads", "0"]) == 2
        assert "--threads" in capsys.readouterr().err


def test_tables_come_in_the_order_of_the_groups():
    """Operators first, then the lengths and the threads; the budget is a table of its own."""
    report = full_report()
    titles = [table.title for table in tables(report)]
    assert titles == ["SSD core", "Microseconds per token by length", "Threads, 2048 tokens"]
    assert budget_table(report.promises).title.startswith("Budget")
