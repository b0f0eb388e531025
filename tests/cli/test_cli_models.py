"""`verify` and `inspect` take the folder of any model; the other commands say what it holds."""

import pytest
import torch
from cli_schemas import SCHEMAS, failure, problems

from anymamba.models import Encoder, EncoderConfig, LatentConfig, LatentModel
from anymamba.nn import (
    BidirectionalConfig,
    Marker,
    MultiGate,
    RegisterConfig,
    ResidualConfig,
    StackConfig,
    VirtualLayers,
)

MAMBA3 = {"layer": "Mamba3", "d_state": 8, "headdim": 8}
GATES = ResidualConfig(multi_gate=MultiGate(n_stream=2))
CAUSAL = StackConfig(
    d_model=16, n_layer=2, ssm_cfg=MAMBA3, virtual=VirtualLayers(4), residual=GATES
)
MARKED = StackConfig(
    d_model=16, n_layer=1, ssm_cfg=MAMBA3, registers=RegisterConfig(stack=[Marker.start()])
)
PAIRED = BidirectionalConfig(
    d_model=16,
    n_layer=2,
    ssm_cfg=MAMBA3,
    merge="cat_linear",
    d_intermediate=8,
    final_norm=True,
    registers=RegisterConfig(stack=[Marker.start()]),
)
MODELS = {
    "latent": lambda: LatentModel(LatentConfig(d_input=3, d_output=2, stack=CAUSAL)),
    "marked": lambda: LatentModel(
        LatentConfig(d_input=3, d_output=2, stack=MARKED, readout="last", task="classification")
    ),
    "paired": lambda: LatentModel(LatentConfig(d_input=3, d_output=2, stack=PAIRED)),
    "pooled": lambda: Encoder(EncoderConfig(vocab_size=32, stack=PAIRED, n_classes=3)),
    "masked": lambda: Encoder(EncoderConfig(vocab_size=32, stack=PAIRED, head="masked")),
}
REFUSED = {"marked": "registers", "paired": "both ends", "pooled": "both ends"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder with one saved model of each kind."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, build in MODELS.items():
        build().save_pretrained(root / name)
    return root


def test_verify_runs_a_model_on_numbers(run, folders):
    """A causal LatentModel is compared in every way, by the schema and as text."""
    result = run("verify", folders / "latent", "--length", "5", "--json")
    assert result.code == 0, result.err
    assert problems(SCHEMAS["verify"], result.document) == []
    assert {"forward", "pieces", "steps"} <= {row["way"] for row in result.document["rows"]}
    assert "All equal" in run("verify", folders / "latent", "--length", "5").out


@pytest.mark.parametrize("name", REFUSED)
def test_verify_says_why_there_is_one_way_only(run, folders, name):
    """Exit code 2, a ConfigError with the reason on stderr and in the document."""
    result = run("verify", folders / name, "--json")
    assert result.code == 2
    assert problems(failure("verify"), result.document) == []
    assert result.document["error"]["type"] == "ConfigError"
    assert REFUSED[name] in result.document["error"]["message"]


@pytest.mark.parametrize("name", MODELS)
def test_inspect_counts_and_times_any_model(run, folders, name, monkeypatch):
    """Counts are the model's, every kind of part is timed, and text fits the terminal."""
    monkeypatch.chdir(folders)
    result = run("inspect", name, "--length", "8", "--repeats", "1", "--json")
    assert result.code == 0, result.err
    assert problems(SCHEMAS["inspect"], result.document) == []
    parts = result.document["count"]["parts"]
    assert set(result.document["seconds"]) == {part["kind"] for part in parts}
    expected = sum(weight.numel() for weight in MODELS[name]().parameters())
    assert result.document["count"]["parameters"] == expected
    text = run("inspect", name, "--length", "8", "--repeats", "1").out
    assert max(len(line) for line in text.splitlines()) <= 80
    assert type(MODELS[name]()).__name__ in text


def test_seconds_count_every_pass(run, folders, monkeypatch):
    """Two sets of weights that run four times cost four times one."""
    monkeypatch.setattr(
        "anymamba.bench.interleaved_medians", lambda cases, repeats: dict.fromkeys(cases, 1.0)
    )
    seconds = run("inspect", folders / "latent", "--json").document["seconds"]
    assert seconds == {"projection": 1, "norm": 4, "Mamba3": 4, "gates": 4, "head": 1}


def test_inspect_reads_no_text_for_a_model_without_one(run, folders, tmp_path):
    """--text asks for perplexities, which only a language model has."""
    text = tmp_path / "text"
    text.write_text("hello")
    result = run("inspect", folders / "latent", "--text", text, "--length", "0", "--json")
    assert result.code == 2
    assert "must be a language model" in result.document["error"]["message"]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_commands_on_text_say_what_the_folder_holds(run, folders, command):
    """Exit code 2, and the class that loads the folder."""
    result = run(command, folders / "pooled", "--json", stdin="hello\n")
    assert result.code == 2
    assert "describes a Encoder" in result.document["error"]["message"]
