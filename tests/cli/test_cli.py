"""Laws of the command line: JSON by schema, exit codes, errors with a reason, quiet pipes."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from cli_schemas import SCHEMAS, failure, problems

import anymamba
from anymamba.cli import main
from anymamba.io import load_pretrained
from anymamba.models import MambaConfig, MambaLM, VerifyReport
from anymamba.ops import ssd

# Quick arguments for each command; a folder stands for the tiny checkpoint, {new} for a new one.
QUICK = {
    "generate": ["{model}", "--prompt", "ab", "--max-new-tokens", "3"],
    "chat": ["{model}", "--max-new-tokens", "3"],
    "verify": ["{model}", "--length", "5"],
    "inspect": ["{model}", "--length", "8"],
    "convert": ["{model}", "{new}"],
    "doctor": [],
}


def arguments_of(command: str, checkpoint, tmp_path) -> list[str]:
    places = {"model": checkpoint, "new": tmp_path / "new"}
    return [command, *(text.format(**places) for text in QUICK[command])]


def start(*arguments: object, **options) -> subprocess.Popen[str]:
    path = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", "anymamba", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.parametrize("command", QUICK)
def test_json_follows_the_schema_and_text_fits_the_terminal(
    run, checkpoint, tmp_path, monkeypatch, command
):
    """With --json stdout holds documents by the schema only; without it, lines of 80 columns."""
    monkeypatch.chdir(checkpoint.parent)  # a short name: titles hold it
    arguments = arguments_of(command, checkpoint.name, tmp_path)
    result = run(*arguments, "--json", stdin="hello\n/undo\n")
    assert result.code == 0, result.err
    assert result.documents
    for document in result.documents:
        assert problems(SCHEMAS[command], document) == []
        assert document["ok"] is True
        assert document["version"] == anymamba.__version__
    if command in ("chat", "generate"):
        return  # they write what the model says
    result = run(*arguments)
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 80
    assert "{" not in result.out


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "integer"}, 1.5),
        ({"type": "integer"}, True),
        ({"type": "number", "minimum": 0}, -1),
        ({"type": "array", "items": {"type": "string"}}, ["a", 1]),
        ({"type": "object", "properties": {"a": {}}}, {}),
        ({"type": "object", "properties": {}}, {"b": 1}),
        ({"enum": ["x"]}, "y"),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, 3),
    ],
)
def test_the_validator_can_fail(schema, value):
    """Each kind of mistake in a document is found."""
    assert len(problems(schema, value)) == 1


@pytest.mark.parametrize("command", ["generate", "chat", "verify", "inspect", "convert"])
def test_errors_have_a_reason(run, tmp_path, command):
    """A missing model: exit code 2, the reason on stderr, and in the document."""
    arguments = arguments_of(command, tmp_path / "nothing", tmp_path)
    result = run(*arguments, "--json")
    assert result.code == 2
    assert result.err.startswith(f"anymamba {command}: ")
    assert "nothing" in result.err
    assert "Traceback" not in result.err
    assert problems(failure(command), result.document) == []
    assert run(*arguments).out == ""


def test_a_failed_check_is_exit_code_one(run, checkpoint):
    """`verify` with an impossible tolerance names the ways that fail."""
    result = run("verify", checkpoint, "--length", "5", "--tolerance", "0")
    assert result.code == 1
    assert "NOT EQUAL" in result.out
    assert run("verify", checkpoint, "--length", "5", "--tolerance", "0", "--json").code == 1


def test_verify_takes_dtypes(run, checkpoint):
    """Several dtypes give several blocks of rows."""
    result = run("verify", checkpoint, "--length", "5", "--dtypes", "float64", "bfloat16", "--json")
    assert result.code == 0
    assert {row["dtype"] for row in result.document["rows"]} == {"float64", "bfloat16"}


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["generate"], ["verify", "m", "--lenght", "3"], ["verify", "m", "--length", "x"]],
)
def test_a_wrong_call_is_exit_code_two(run, arguments):
    """Usage errors are explained on stderr; stdout stays empty."""
    result = run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err


def test_a_misspelt_flag_is_corrected(run):
    """The nearest flag is named."""
    assert "--length" in run("verify", "m", "--lenght", "3").err


def test_help_and_version(run):
    """Both end well; help names every command."""
    result = run("--help")
    assert result.code == 0
    assert all(command in result.out for command in SCHEMAS)
    assert run("--version").out == f"anymamba {anymamba.__version__}\n"
    for command in SCHEMAS:
        assert "--json" in run(command, "--help").out


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_can_complete(run, shell):
    """A completion script that knows the commands is printed."""
    result = run("--tyro-print-completion", shell)
    assert result.code == 0
    assert "generate" in result.out


def test_a_missing_extra_is_named(monkeypatch, capsys):
    """Without tyro or rich the command line says what to install, and the library still works."""
    for name in [n for n in sys.modules if n.split(".")[0] in ("tyro", "rich")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [n for n in sys.modules if n.startswith("anymamba.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["doctor"]) == 2
    assert "pip install 'anymamba[cli]'" in capsys.readouterr().err


def test_convert_changes_format_and_dtype(run, checkpoint, tmp_path):
    """A converted checkpoint holds the same model, rounded where that was asked for."""
    target = tmp_path / "bin"
    result = run("convert", checkpoint, target, "--format", "bin", "--dtype", "bfloat16", "--json")
    assert result.code == 0, result.err
    assert "pytorch_model.bin" in [file["name"] for file in result.document["files"]]
    ids = torch.arange(9)[None]
    want, got = (load_pretrained(folder)(ids).detach() for folder in (checkpoint, target))
    torch.testing.assert_close(got, want, rtol=0.1, atol=0.02)
    assert not torch.equal(got, want)


def test_convert_says_how_the_weights_are_stored(run, checkpoint, tmp_path):
    """The scheme of the new files, also when they were integers before; none is null."""
    narrow, copied = tmp_path / "narrow", tmp_path / "copied"
    plain = run("convert", checkpoint, tmp_path / "plain", "--json").document
    made = run("convert", checkpoint, narrow, "--quantize", "int8", "--json").document
    again = run("convert", narrow, copied, "--json").document
    assert [found["quantize"] for found in (plain, made, again)] == [None, "int8", "int8"]
    assert problems(SCHEMAS["convert"], made) == []
    text = run("convert", narrow, tmp_path / "text").out
    assert "layout official, format safetensors, quantised as int8" in " ".join(text.split())
    assert "quantised" not in run("convert", checkpoint, tmp_path / "wide").out


def test_a_layout_that_does_not_exist_is_refused(run, checkpoint, tmp_path):
    """transformers has no Mamba-3: exit code 2, and nothing is written."""
    target = tmp_path / "hf"
    result = run("convert", checkpoint, target, "--layout", "transformers")
    assert result.code == 2
    assert not target.exists()


def test_a_closed_pipe_is_no_error(checkpoint):
    """`generate | head -1`: the reader goes, the command ends with code 0 and says nothing."""
    with start("generate", checkpoint, "--prompt", "x", "--max-new-tokens", 100000) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(timeout=60) == 0, errors
    assert errors == ""


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["train", "--help"]])
def test_help_into_a_closed_pipe_is_no_error(arguments):
    """Nobody reads what is said before a command runs: that is no error either."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "anymamba", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_inspect_needs_a_run_for_a_median(run, checkpoint):
    """No runs have no median."""
    result = run("inspect", checkpoint, "--repeats", 0)
    assert result.code == 2
    assert "--repeats must be at least 1" in result.err


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_cleanly(checkpoint):
    """An interrupt ends the text: the speed is still told, the code is 130, no traceback."""
    with start("generate", checkpoint, "--prompt", "x", "--max-new-tokens", 100000) as process:
        assert process.stdout.read(1)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "tokens/s" in errors
    assert "Traceback" not in errors


@pytest.mark.filterwarnings("always::UserWarning")
def test_the_notice_about_a_checkpoint_reaches_the_user(run, checkpoint, tmp_path):
    """What the library warns of is one line on stderr, and stdout stays JSON."""
    folder = tmp_path / "official"
    shutil.copytree(checkpoint, folder)
    (folder / "anymamba.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    del config["ssm_cfg"]["a_activation"]
    (folder / "config.json").write_text(json.dumps(config))
    result = run("verify", folder, "--length", "2", "--json")
    assert "heavy_tail" in result.err
    assert all(line.startswith("anymamba: ") for line in result.err.splitlines())
    assert result.document["ok"] is True
    assert run("verify", checkpoint, "--length", "2", "--json").err == ""


def test_what_the_library_logs_reaches_the_user(run, checkpoint, monkeypatch):
    """Warnings of its loggers appear on stderr once, and the handler does not stay behind."""
    logger = logging.getLogger("anymamba.models")

    def noisy(*_, **__):
        logger.warning("mind the gap")
        return VerifyReport((), 1, 1)

    monkeypatch.setattr("anymamba.models.verify", noisy)
    for _ in range(2):
        assert run("verify", checkpoint, "--json").err == "anymamba: mind the gap\n"
    assert logging.getLogger("anymamba").handlers == []


def test_doctor_knows_why_not(run):
    """Every operator is served, and each refused implementation has a reason."""
    document = run("doctor", "--json").document
    assert {row["operator"] for row in document["operators"]} == {
        "selective_scan",
        "ssd",
        "trapezoid_scan",
    }
    for row in document["operators"]:
        assert row["ok"]
        assert row["auto"] not in row["refused"]
        assert all(row["refused"].values())
    assert document["versions"]["torch"] == torch.__version__
    assert document["devices"][0]["device"] == "cpu"


def test_doctor_notices_a_wrong_operator(run, monkeypatch):
    """An operator that disagrees with its reference is exit code 1."""

    def wrong(*args, impl="auto", **how):
        y, final = ssd(*args, impl=impl, **how)
        return (y if impl == "reference" else y * 1.1), final

    monkeypatch.setattr("anymamba.cli.scans.ssd", wrong)
    result = run("doctor", "--json")
    assert result.code == 1
    assert [row["operator"] for row in result.document["operators"] if not row["ok"]] == ["ssd"]


def test_inspect_times_every_kind_of_part(run, tmp_path, monkeypatch):
    """Counts are the model's, and each kind takes the time of one, times their number."""
    config = MambaConfig(
        d_model=16,
        n_layer=2,
        vocab_size=256,
        d_intermediate=16,
        ssm_cfg={"layer": "Mamba2", "d_state": 8, "headdim": 8},
        attn_layer_idx=[1],
        attn_cfg={"num_heads": 2, "causal": True},
    )
    lm = MambaLM(config)
    lm.save_pretrained(tmp_path)
    document = run("inspect", tmp_path, "--length", "8", "--repeats", "1", "--json").document
    kinds = {"embedding", "norm", "Mamba2", "MHA", "GatedMLP", "head"}
    assert set(document["seconds"]) == kinds
    assert {part["kind"] for part in document["count"]["parts"]} == kinds
    assert document["count"]["parameters"] == sum(x.numel() for x in lm.parameters())
    assert run("inspect", tmp_path, "--length", "0", "--json").document["seconds"] == {}
    text = run("inspect", tmp_path, "--length", "8").out
    assert all(kind in text for kind in kinds)
    monkeypatch.setattr(
        "anymamba.bench.interleaved_medians", lambda cases, repeats: dict.fromkeys(cases, 1.0)
    )
    document = run("inspect", tmp_path, "--json").document
    numbers = {"embedding": 1, "norm": 5, "Mamba2": 1, "MHA": 1, "GatedMLP": 2, "head": 1}
    assert document["seconds"] == numbers
