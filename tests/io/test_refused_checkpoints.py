"""What is refused: damaged and foreign files, and options that contradict each other."""

import json
import math
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import IN_TRANSFORMERS, LM, NAMES, content, edit, load
from safetensors.torch import save_file

from anymamba.errors import CheckpointError, ConfigError
from anymamba.io import convert_checkpoint, load_pretrained, read_config, save_pretrained
from anymamba.models import MambaConfig, MambaLM


def test_a_mismatch_is_one_table(folder: Path):
    """Missing, unexpected and wrong-shaped names stand in one message."""
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True)
    del stored["backbone.layers.1.mixer.D"]
    stored["backbone.layers.1.mixer.E"] = torch.zeros(5)
    stored["backbone.norm_f.weight"] = torch.zeros(17)
    torch.save(stored, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(folder)
    rows = [line.split() for line in str(caught.value).splitlines()]
    assert "1 missing, 1 unexpected, 1 wrong shape" in str(caught.value)
    assert ["missing", "backbone.layers.1.mixer.D", "[4]"] in rows
    assert ["unexpected", "backbone.layers.1.mixer.E", "[5]"] in rows
    assert ["wrong", "shape", "backbone.norm_f.weight", "[16]", "[17]"] in rows


def test_another_family_is_refused_in_a_short_table(folder: Path):
    """A foreign checkpoint differs in every name; the table shows the pattern, not all of it."""
    shutil.copy(LM / "lm_mamba1_tied" / "pytorch_model.bin", folder)
    with pytest.raises(CheckpointError, match=r"Mamba2 model with this config") as caught:
        load_pretrained(folder)
    assert "more" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 35


def test_a_tied_head_that_differs_is_refused(folder: Path):
    """Dropping one of two different matrices in silence would lose weights."""
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True)
    stored["lm_head.weight"] = stored["lm_head.weight"] + 1
    torch.save(stored, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"must equal backbone\.embedding\.weight"):
        load_pretrained(folder)


def test_an_unknown_key_is_refused_with_the_nearest(folder: Path):
    """A typing mistake in a config is not passed over."""
    config = json.loads((folder / "config.json").read_text())
    config["d_modell"] = config.pop("d_model")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"unknown key 'd_modell'. Did you mean 'd_model'"):
        read_config(folder)


def test_an_activation_that_cannot_be_meant_is_refused(folder: Path):
    """Only Mamba-3 has one, and there are two."""
    with pytest.raises(ConfigError, match="belongs to Mamba-3"):
        load_pretrained(folder, a_activation="softplus")
    with pytest.raises(ConfigError, match="must be one of"):
        load_pretrained(LM / "lm_mamba3_siso_mlp_softplus", a_activation="relu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm": "false"}, "rms_norm must be true or false; got 'false'"),
        ({"ssm_cfg": {"layer": "Mamba2", "bias": "no"}}, "bias must be true or false; got 'no'"),
        ({"model_type": "mamba", "use_bias": "no"}, "bias must be true or false; got 'no'"),
        (
            {"model_type": "mamba", "tie_word_embeddings": "no"},
            "tie_embeddings must be true or false; got 'no'",
        ),
        (
            {"model_type": "mamba2", "time_step_limit": [0.0]},
            r"time_step_limit must be two numbers; got \[0\.0\]",
        ),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], message: str, folder: Path):
    """Half a pair, or a word that Python would take for true, is refused with its name."""
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_config(folder)
    assert str(folder / "config.json") in str(caught.value)


@pytest.mark.parametrize("device", ["bogus", "cuda:99"])
def test_a_device_that_cannot_be_used_is_refused(device: str, folder: Path):
    """Torch's own words differ from device to device; ours name it and say what to do."""
    with pytest.raises(ConfigError, match=f"device must be one .* got '{device}'.* Use cpu"):
        load_pretrained(folder, device=device)


class Bomb:
    """Leaves a mark when it is unpickled by a careless reader."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def _index(folder: Path, table: Any) -> None:
    (folder / BIN).unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def _cut_safetensors(folder: Path) -> None:
    load_pretrained(folder).save_pretrained(folder)
    _cut(folder / "model.safetensors")


def _plain_bomb(folder: Path) -> None:
    text = pickle.dumps({"x": Bomb(folder.parent / "mark")}, protocol=2)
    (folder / BIN).write_bytes(text)


def _shard(folder: Path, shard: str, *, more: tuple[str, ...] = (), less: int = 0) -> None:
    """Make the healthy weights one shard of an index that is wrong about it."""
    weights = torch.load(folder / BIN, weights_only=True)
    del weights["lm_head.weight"]
    if shard.endswith(".bin"):
        torch.save(weights, folder / shard)
    else:
        save_file(weights, folder / shard)
    _index(folder, dict.fromkeys([*list(weights)[less:], *more], shard))


BIN = "pytorch_model.bin"
DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty bin": lambda folder: (folder / BIN).write_bytes(b""),
    "empty safetensors": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "truncated bin": lambda folder: _cut(folder / BIN),
    "truncated safetensors": _cut_safetensors,
    "text instead of weights": lambda folder: (folder / BIN).write_text("version 1\n"),
    "bomb in an archive": lambda x: torch.save(
        {"lm_head.weight": Bomb(x.parent / "mark")}, x / BIN
    ),
    "bomb in a plain pickle": _plain_bomb,
    "a list of tensors": lambda folder: torch.save([torch.zeros(2)], folder / BIN),
    "a nested dictionary": lambda folder: torch.save({"x": {"y": torch.zeros(2)}}, folder / BIN),
    "integer weights": lambda folder: torch.save({"x": torch.zeros(2).int()}, folder / BIN),
    "no weights": lambda folder: (folder / BIN).unlink(),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "damaged config": lambda folder: (folder / "config.json").write_text('{"d_model": 16,'),
    "config is a list": lambda folder: (folder / "config.json").write_text("[1]"),
    "wrong type in config": lambda folder: edit(folder, d_model="wide"),
    "null in config": lambda folder: edit(folder, ssm_cfg=None),
    "impossible sizes": lambda folder: edit(folder, ssm_cfg={"layer": "Mamba2", "headdim": 7}),
    "a billion layers": lambda folder: edit(folder, n_layer=10**9),
    "another architecture": lambda folder: edit(folder, model_type="llama"),
    "another epsilon": lambda folder: edit(folder, model_type="mamba", layer_norm_epsilon=1e-6),
    "wrong type for transformers": lambda x: edit(x, model_type="mamba2", head_dim="wide"),
    "a limit of words": lambda x: edit(x, model_type="mamba2", time_step_limit=[0.0, {"x": 1}]),
    "half a limit": lambda x: edit(x, ssm_cfg={"layer": "Mamba2", "headdim": 8, "dt_limit": [0]}),
    "an infinite width": lambda x: edit(x, model_type="mamba", intermediate_size=math.inf),
    "an infinite factor": lambda x: edit(x, ssm_cfg={"layer": "Mamba2", "expand": math.inf}),
    "a word for true": lambda folder: edit(folder, rms_norm="false"),
    "shard outside the folder": lambda folder: _shard(folder, "../model-1.safetensors"),
    "shard that is a pickle": lambda folder: _shard(folder, "model-1.bin"),
    "shard that is missing": lambda folder: _index(folder, {"x": "model-1.safetensors"}),
    "index that lists too much": lambda x: _shard(x, "model-1.safetensors", more=("y",)),
    "index that lists too little": lambda x: _shard(x, "model-1.safetensors", less=1),
    "index without a table": lambda folder: _index(folder, None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused(damage: str, folder: Path, tmp_path: Path):
    """A clear error; nothing in the file is run, and nothing on disk is changed."""
    DAMAGES[damage](folder)
    save_pretrained(MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=9)), tmp_path / "target")
    before = content(folder), content(tmp_path / "target")
    with pytest.raises(CheckpointError, match=r"^load_pretrained: ") as caught:
        load_pretrained(folder)
    assert str(folder) in str(caught.value)
    with pytest.raises(CheckpointError, match=r"^convert_checkpoint: "):
        convert_checkpoint(folder, tmp_path / "target")
    assert (content(folder), content(tmp_path / "target")) == before
    assert not (tmp_path / "mark").exists()


def test_the_bomb_is_live(tmp_path: Path):
    """The file that the law above refuses does go off in a careless reader."""
    torch.save({"x": Bomb(tmp_path / "mark")}, tmp_path / "bomb.bin")
    torch.load(tmp_path / "bomb.bin", weights_only=False)
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", [n for n in NAMES if n not in IN_TRANSFORMERS])
def test_models_that_transformers_lacks_are_refused_before_writing(name: str, tmp_path: Path):
    """The reason is named, and not even the folder is created."""
    with pytest.raises(CheckpointError, match=r"it has no .*\. Use layout='official'"):
        load(name).save_pretrained(tmp_path / "new", layout="transformers")
    assert not (tmp_path / "new").exists()


def test_contradicting_options_are_refused(tiny: MambaLM, folder: Path, tmp_path: Path):
    """Each mistake of a caller has its message, and nothing is written."""
    target = tmp_path / "new"
    for options, message in (
        ({"layout": "burn"}, "layout must be one of"),
        ({"format": "gguf"}, "format must be one of"),
        ({"dtype": torch.int8}, "dtype must be one of"),
        ({"format": "bin", "max_shard_bytes": 10}, "belongs to safetensors"),
        ({"max_shard_bytes": 0}, "must be positive"),
    ):
        with pytest.raises(ConfigError, match=message):
            save_pretrained(tiny, target, **options)
        assert not target.exists()
    with pytest.raises(CheckpointError, match="must have values"):
        save_pretrained(MambaLM(tiny.config, device="meta"), target)
    with pytest.raises(CheckpointError, match="must be a folder"):
        save_pretrained(tiny, folder / "config.json")
    with pytest.raises(CheckpointError, match="another folder than the source"):
        convert_checkpoint(folder, folder / ".." / "model")
    with pytest.raises(ConfigError, match="revision belongs to the hub"):
        load_pretrained(folder, revision="main")
    with pytest.raises(CheckpointError, match="is a file"):
        load_pretrained(folder / "config.json")
    for name in ("./nowhere", "/nowhere/at/all", "a/b/c", "../x", Path("owner") / "name"):
        with pytest.raises(CheckpointError, match="must be an existing folder"):
            load_pretrained(name)


def test_without_safetensors_the_hint_says_what_to_install(
    tiny: MambaLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Writing and reading say which package is missing."""
    save_pretrained(tiny, tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    with pytest.raises(CheckpointError, match=r"pip install 'anymamba\[io\]'"):
        load_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"pip install 'anymamba\[io\]'"):
        save_pretrained(tiny, tmp_path)
