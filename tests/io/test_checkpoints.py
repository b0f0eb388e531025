"""Checkpoints: the golden models, every layout there and back, and what must be refused."""

import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import anymamba.io.weights_file as weights_file
from anymamba.errors import CheckpointError, ConfigError
from anymamba.io import convert_checkpoint, load_pretrained, read_config, save_pretrained
from anymamba.models import MambaConfig, MambaLM
from golden import HERE, relative_error

LM = HERE / "lm"
INDEX = {entry["name"]: entry for entry in json.loads((LM / "index.json").read_text())}
NAMES = sorted(INDEX)
# transformers has no Mamba-3, no MLP, no attention and no layer norm.
IN_TRANSFORMERS = ("lm_mamba1_tied", "lm_mamba2_tied")
ROUTES = ("safetensors", "bin", "shards", "transformers", "transformers-bin")


def activation(name: str) -> str | None:
    return INDEX[name]["a_activation"] or None


def load(name: str, dtype: torch.dtype = torch.float64) -> MambaLM:
    return load_pretrained(LM / name, dtype=dtype, a_activation=activation(name))


def greedy(lm: MambaLM, prompt_bs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return prompt and new tokens, and the scores they were chosen from."""
    size = lm.config.vocab_size
    logits_bsw, cache = lm.prefill(prompt_bs, num_last_tokens=1)
    logits_bw, ids, scores = logits_bsw[:, -1], [prompt_bs], []
    for _ in range(count):
        scores.append(logits_bw[:, :size])
        ids.append(scores[-1].argmax(-1, keepdim=True))
        logits_bw, cache = lm.step(ids[-1][:, 0], cache)
    return torch.cat(ids, 1), torch.stack(scores, 1)


def assert_golden(name: str, lm: MambaLM, dtype: torch.dtype) -> None:
    """Compare logits, loss, the gradient of every parameter, and greedy generation."""
    golden = load_file(LM / name / "golden.safetensors")
    recorded = INDEX[name]["fp32_official_reference"]
    exact = dtype == torch.float64
    value_limit = 1e-9 if exact else 10 * recorded["logits_abs"] / recorded["logits_max"]
    ids_bs = golden["input_ids"]
    with torch.no_grad():
        assert relative_error(golden["logits"], lm(ids_bs)) <= value_limit
        last = lm(ids_bs, num_last_tokens=2)
        assert relative_error(golden["logits_last2"], last) <= value_limit
        sequences, scores = greedy(lm, golden["gen/prompt"], golden["gen/scores"].shape[1])
    assert torch.equal(golden["gen/sequences"], sequences)
    assert relative_error(golden["gen/scores"], scores) <= value_limit
    lm.zero_grad()
    loss = lm.loss(ids_bs)
    assert relative_error(golden["loss"][0], loss.detach()) <= value_limit
    loss.backward()
    grads = {name: x.grad for name, x in lm.named_parameters()}
    judged = {key.partition("/")[2] for key in golden if key.startswith(("grad/", "gradrow0/"))}
    assert judged == set(grads)
    for key, expected in golden.items():
        kind, _, parameter = key.partition("/")
        if kind not in ("grad", "gradrow0", "gradnorm"):
            continue
        grad = grads[parameter]
        assert grad is not None
        actual = {"grad": grad, "gradrow0": grad[0], "gradnorm": grad.norm()[None]}[kind]
        stored = 1e-9 if expected.dtype == torch.float64 else 5e-7
        limit = stored if exact else 10 * recorded["grad_rel"]
        assert relative_error(expected, actual) <= limit, key


def take(route: str, save: Any, folder: Path) -> None:
    """Write by a route: `save` is save_pretrained or convert_checkpoint, bound to its source."""
    layout = "transformers" if route.startswith("transformers") else "official"
    format = "bin" if route.endswith("bin") else "safetensors"
    shard = {"max_shard_bytes": 8000} if route == "shards" else {}
    save(folder, layout=layout, format=format, **shard)


def same_weights(expected: MambaLM, actual: MambaLM) -> None:
    wanted, got = expected.state_dict(), actual.state_dict()
    assert list(wanted) == list(got)
    for name, value in wanted.items():
        assert value.dtype == got[name].dtype, name
        assert torch.equal(value, got[name]), name


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A healthy copy of one golden checkpoint, official `.bin`."""
    shutil.copytree(LM / "lm_mamba2_tied", tmp_path / "model")
    (tmp_path / "model" / "golden.safetensors").unlink()
    return tmp_path / "model"


@pytest.fixture
def tiny() -> MambaLM:
    torch.manual_seed(0)
    return MambaLM(MambaConfig(d_model=8, n_layer=3, vocab_size=13))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_official_checkpoints_give_official_numbers(name: str, dtype: torch.dtype):
    """Logits, loss, the gradient of every parameter and greedy tokens are the official ones."""
    assert_golden(name, load(name, dtype), dtype)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", NAMES)
def test_every_layout_keeps_the_model(name: str, route: str, tmp_path: Path):
    """Saved or converted, there and back: the same config, bits and numbers."""
    if route.startswith("transformers") and name not in IN_TRANSFORMERS:
        pytest.skip("transformers has no such model")
    source = load(name, torch.float32)

    def convert(target: Path, **how: Any) -> None:
        convert_checkpoint(LM / name, target, a_activation=activation(name), **how)

    take(route, source.save_pretrained, tmp_path / "saved")
    take(route, convert, tmp_path / "converted")
    convert_checkpoint(tmp_path / "converted", tmp_path / "back", format="bin")
    for place in ("saved", "converted", "back"):
        again = MambaLM.from_pretrained(tmp_path / place)
        same_weights(source, again)
        assert again.config.to_dict() == source.config.to_dict()
    assert (len(list((tmp_path / "saved").glob("model-*-of-*"))) > 1) == (route == "shards")
    assert_golden(name, load_pretrained(tmp_path / "back", dtype=torch.float64), torch.float64)


def test_both_files_of_a_golden_directory_agree():
    """A `.bin` and a safetensors file of one model load alike."""
    for name in ("lm_mamba1_tied", "lm_mamba3_siso_mlp_heavy_tail"):
        binary = torch.load(LM / name / "pytorch_model.bin", weights_only=True)
        lm = load(name, torch.float32)
        for key, value in lm.state_dict().items():
            assert torch.equal(binary[key], value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_loading_casts_like_the_constructor(dtype: torch.dtype, folder: Path):
    """Every parameter has the dtype that a new model would give it, and the rounded value."""
    exact = load_pretrained(folder).state_dict()
    lm = load_pretrained(folder, dtype=dtype)
    new = MambaLM(lm.config, dtype=dtype).state_dict()
    for name, value in lm.state_dict().items():
        assert value.dtype == new[name].dtype, name
        assert torch.equal(value, exact[name].to(value.dtype)), name
    assert new["backbone.layers.0.mixer.D"].dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_saving_casts_and_loading_does_not_add_error(format: str, folder: Path, tmp_path: Path):
    """A model stored in bfloat16 has the values that casting it would give."""
    lm = load_pretrained(folder)
    save_pretrained(lm, tmp_path / "half", format=format, dtype=torch.bfloat16)
    convert_checkpoint(folder, tmp_path / "too", format=format, dtype=torch.bfloat16)
    expected = load_pretrained(folder, dtype=torch.bfloat16)
    for place in ("half", "too"):
        same_weights(expected, load_pretrained(tmp_path / place, dtype=torch.bfloat16))
    size = (tmp_path / "half" / weights_file._SINGLE[format]).stat().st_size
    assert size < 0.7 * (folder / "pytorch_model.bin").stat().st_size


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_a_loaded_model_owns_its_memory(format: str, tiny: MambaLM, tmp_path: Path):
    """Writing into the file, in place, changes nothing in a model that was loaded from it."""
    save_pretrained(tiny, tmp_path, format=format)
    lm = load_pretrained(tmp_path)
    file = tmp_path / weights_file._SINGLE[format]
    with open(file, "r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)
    same_weights(tiny, lm)
    assert all(x.data_ptr() % 64 == 0 for x in lm.parameters())


def test_loading_keeps_tags_and_random_numbers(folder: Path):
    """Parameters keep what optimisers look for, and the caller's next draw is untouched."""
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    lm = load_pretrained(folder)
    assert torch.equal(expected, torch.rand(4))
    new = MambaLM(lm.config)
    for (name, parameter), (_, fresh) in zip(
        lm.named_parameters(), new.named_parameters(), strict=True
    ):
        assert vars(parameter) == vars(fresh), name
        assert parameter.requires_grad
        assert parameter.is_leaf
    assert vars(lm.backbone.layers[0].mixer.A_log)["_no_weight_decay"]  # pyright: ignore


def test_a_tied_head_is_the_embedding_whether_stored_or_not(folder: Path, tmp_path: Path):
    """Official files repeat the embedding as the head, conversions leave it out."""
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True)
    del stored["lm_head.weight"]
    shutil.copytree(folder, tmp_path / "without")
    torch.save(stored, tmp_path / "without" / "pytorch_model.bin")
    for place in (folder, tmp_path / "without"):
        lm = load_pretrained(place)
        assert lm.lm_head.weight is lm.backbone.embedding.weight


def test_a_tied_head_that_differs_is_refused(folder: Path):
    """Dropping one of two different matrices in silence would lose weights."""
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True)
    stored["lm_head.weight"] = stored["lm_head.weight"] + 1
    torch.save(stored, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="must equal backbone.embedding.weight"):
        load_pretrained(folder)


def test_official_bin_has_the_head_at_no_cost(tiny: MambaLM, tmp_path: Path):
    """The official loader insists on `lm_head.weight`; it shares the embedding's storage."""
    save_pretrained(tiny, tmp_path, format="bin")
    stored = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert list(stored) == list(tiny.state_dict())
    head, embedding = stored["lm_head.weight"], stored["backbone.embedding.weight"]
    assert head.data_ptr() == embedding.data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_saved_configs_have_the_official_keys_only(name: str, tmp_path: Path):
    """The official dataclass can be built from the saved file; our version lies beside it."""
    fields = (
        "d_model d_intermediate n_layer vocab_size ssm_cfg attn_layer_idx attn_cfg rms_norm "
        "residual_in_fp32 fused_add_norm pad_vocab_size_multiple tie_embeddings"
    ).split()
    official = make_dataclass("MambaConfig", fields)
    load(name).save_pretrained(tmp_path, format="bin")
    saved = json.loads((tmp_path / "config.json").read_text())
    source = json.loads((LM / name / "config.json").read_text())
    assert set(saved) == set(fields)
    if activation(name):
        source["ssm_cfg"]["a_activation"] = activation(name)
    assert vars(official(**saved)) == source
    notes = json.loads((tmp_path / "anymamba.json").read_text())
    assert notes["version"]
    assert notes.get("a_activation") == activation(name)


def test_the_activation_of_a_is_announced_once_unless_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Official Mamba-3 configs do not tell it; ours do, and an argument settles it."""
    name = "lm_mamba3_siso_mlp_softplus"
    with caplog.at_level(logging.WARNING, logger="anymamba.io"):
        assumed = load_pretrained(LM / name)
    assert len(caplog.records) == 1
    assert "a_activation='softplus'" in caplog.text
    assert assumed.config.ssm_cfg["a_activation"] == "heavy_tail"
    caplog.clear()
    given = load_pretrained(LM / name, a_activation="softplus")
    save_pretrained(given, tmp_path)
    again = load_pretrained(tmp_path)
    assert again.config.ssm_cfg["a_activation"] == "softplus"
    other = load_pretrained(tmp_path, a_activation="heavy_tail")
    assert other.config.ssm_cfg["a_activation"] == "heavy_tail"
    assert not caplog.records
    ids_bs = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(given(ids_bs), again(ids_bs))
        assert torch.equal(assumed(ids_bs), other(ids_bs))
        assert not torch.allclose(given(ids_bs), assumed(ids_bs), rtol=1e-2)


def test_an_activation_that_cannot_be_meant_is_refused(folder: Path):
    """Only Mamba-3 has one, and there are two."""
    with pytest.raises(ConfigError, match="belongs to Mamba-3"):
        load_pretrained(folder, a_activation="softplus")
    with pytest.raises(ConfigError, match="must be one of"):
        load_pretrained(LM / "lm_mamba3_siso_mlp_softplus", a_activation="relu")


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


def test_an_unknown_key_is_refused_with_the_nearest(folder: Path):
    """A typing mistake in a config is not passed over."""
    config = json.loads((folder / "config.json").read_text())
    config["d_modell"] = config.pop("d_model")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"unknown key 'd_modell'. Did you mean 'd_model'"):
        read_config(folder)


class Bomb:
    """Leaves a mark when it is unpickled by a careless reader."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def _index(folder: Path, table: Any) -> None:
    (folder / "pytorch_model.bin").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def _edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def _cut(folder: Path) -> None:
    load_pretrained(folder).save_pretrained(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def _damage(name: str, folder: Path) -> None:
    """Spoil a checkpoint in one way."""
    file = folder / "pytorch_model.bin"
    match name:
        case "empty bin":
            file.write_bytes(b"")
        case "empty safetensors":
            (folder / "model.safetensors").write_bytes(b"")
        case "truncated bin":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        case "truncated safetensors":
            _cut(folder)
        case "text instead of weights":
            file.write_text("version https://git-lfs.github.com/spec/v1\n")
        case "bomb in an archive":
            torch.save({"lm_head.weight": Bomb(folder.parent / "mark")}, file)
        case "bomb in a plain pickle":
            file.write_bytes(pickle.dumps({"x": Bomb(folder.parent / "mark")}, protocol=2))
        case "a list of tensors":
            torch.save([torch.zeros(2)], file)
        case "a nested dictionary":
            torch.save({"state_dict": {"x": torch.zeros(2)}}, file)
        case "integer weights":
            torch.save({"backbone.norm_f.weight": torch.zeros(16, dtype=torch.int8)}, file)
        case "no weights":
            file.unlink()
        case "no config":
            (folder / "config.json").unlink()
        case "damaged config":
            (folder / "config.json").write_text('{"d_model": 16,')
        case "config is a list":
            (folder / "config.json").write_text("[1]")
        case "wrong type in config":
            _edit(folder, d_model="wide")
        case "null in config":
            _edit(folder, ssm_cfg=None)
        case "impossible sizes":
            _edit(folder, ssm_cfg={"layer": "Mamba2", "headdim": 7})
        case "a billion layers":
            _edit(folder, n_layer=10**9)
        case "another architecture":
            _edit(folder, model_type="llama")
        case "shard outside the folder":
            save_file({"x": torch.zeros(2)}, folder.parent / "x.safetensors")
            _index(folder, {"x": "../x.safetensors"})
        case "shard that is a pickle":
            shutil.copy(file, folder / "model-1.bin")
            _index(folder, {"x": "model-1.bin"})
        case "shard that is missing":
            _index(folder, {"x": "model-1.safetensors"})
        case "index that lists too much":
            save_file({"x": torch.zeros(2)}, folder / "model-1.safetensors")
            _index(folder, {"x": "model-1.safetensors", "y": "model-1.safetensors"})
        case "index that lists too little":
            save_file({"x": torch.zeros(2), "y": torch.ones(1)}, folder / "model-1.safetensors")
            _index(folder, {"x": "model-1.safetensors"})
        case "index without a table":
            _index(folder, None)
        case _:
            raise AssertionError(name)


DAMAGES = [
    line.partition('case "')[2].rstrip('":')
    for line in Path(__file__).read_text().splitlines()
    if line.strip().startswith('case "')
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused(damage: str, folder: Path, tmp_path: Path):
    """A clear error; nothing in the file is run, and nothing on disk is changed."""
    _damage(damage, folder)
    save_pretrained(MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=9)), tmp_path / "target")
    before = content(folder), content(tmp_path / "target")
    with pytest.raises(CheckpointError, match=r"^load_pretrained: ") as caught:
        load_pretrained(folder)
    assert str(folder) in str(caught.value) or "config.json" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"^convert_checkpoint: "):
        convert_checkpoint(folder, tmp_path / "target")
    assert (content(folder), content(tmp_path / "target")) == before
    assert not (tmp_path / "mark").exists()


def test_the_bomb_is_live(tmp_path: Path):
    """The file that the law above refuses does go off in a careless reader."""
    torch.save({"x": Bomb(tmp_path / "mark")}, tmp_path / "bomb.bin")
    torch.load(tmp_path / "bomb.bin", weights_only=False)
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("route", ["safetensors", "bin", "shards"])
@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=repr)
def test_a_crash_while_saving_leaves_the_old_model_whole(
    route: str, error: BaseException, tiny: MambaLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Half a file is never seen: the old one stays until the new one is complete."""
    limit = {"max_shard_bytes": 1500} if route == "shards" else {}
    how: dict[str, Any] = {"format": "bin"} if route == "bin" else limit
    save_pretrained(tiny, tmp_path, **how)
    before = content(tmp_path)
    with torch.no_grad():
        changed = MambaLM(tiny.config)

    calls = []

    def bytes_of(tensor: Tensor) -> bytearray:
        calls.append(tensor)
        if len(calls) > 12:
            raise error
        return bytearray(tensor.numel() * tensor.element_size())

    def save(_: Any, stream: Any) -> None:
        stream.write(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(weights_file, "bytes_of", bytes_of)
        patch.setattr(torch, "save", save)
        expected = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
        with pytest.raises(expected):
            save_pretrained(changed, tmp_path, **how)
    assert content(tmp_path) == before
    same_weights(tiny, load_pretrained(tmp_path))
    save_pretrained(changed, tmp_path, **how)
    same_weights(changed, load_pretrained(tmp_path))


@pytest.mark.parametrize("first", ["safetensors", "bin", "shards"])
@pytest.mark.parametrize("second", ["safetensors", "bin", "shards"])
def test_the_last_save_is_what_loads(first: str, second: str, tiny: MambaLM, tmp_path: Path):
    """Weights of another format from before do not shadow the new ones, nor stay behind."""
    take(first, tiny.save_pretrained, tmp_path / "model")
    new = MambaLM(tiny.config)
    take(second, new.save_pretrained, tmp_path / "model")
    same_weights(new, load_pretrained(tmp_path / "model"))
    take(second, new.save_pretrained, tmp_path / "alone")
    assert len(content(tmp_path / "model")) == len(content(tmp_path / "alone"))


def test_saving_over_a_link_keeps_the_file_behind_it(tiny: MambaLM, tmp_path: Path):
    """The hub's cache is made of links to shared files, which must not change."""
    save_pretrained(tiny, tmp_path / "blobs")
    before = content(tmp_path / "blobs")
    (tmp_path / "model").mkdir()
    for name in before:
        (tmp_path / "model" / name).symlink_to(tmp_path / "blobs" / name)
    new = MambaLM(tiny.config)
    save_pretrained(new, tmp_path / "model")
    assert content(tmp_path / "blobs") == before
    same_weights(new, load_pretrained(tmp_path / "model"))


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
        assert not target.exists() or not content(target)
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


def test_conversion_takes_the_tokenizer_along(folder: Path, tmp_path: Path):
    """A converted model can be used with the same text and the same special tokens."""
    (folder / "tokenizer.json").write_text('{"model": 1}')
    convert_checkpoint(folder, tmp_path / "one", layout="transformers")
    _edit(tmp_path / "one", eos_token_id=11)
    convert_checkpoint(tmp_path / "one", tmp_path / "two", layout="transformers")
    assert (tmp_path / "two" / "tokenizer.json").read_text() == '{"model": 1}'
    assert json.loads((tmp_path / "two" / "config.json").read_text())["eos_token_id"] == 11
    assert read_config(tmp_path / "two") == read_config(folder)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fake_hub(cache: Path, source: Path, reference: str) -> Path:
    """Lay a checkpoint out as huggingface_hub's cache does, without a network."""
    repository = cache / "models--state-spaces--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for place, file in enumerate(source.iterdir()):
        shutil.copy(file, repository / "blobs" / str(place))
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(place))
    (repository / "refs" / reference).parent.mkdir(parents=True)
    (repository / "refs" / reference).write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize("reference", ["main", "refs/pr/1"])
@pytest.mark.parametrize("route", ["safetensors", "bin", "shards", "transformers"])
def test_hub_names_load_from_the_cache(route: str, reference: str, tmp_path: Path):
    """A name and a revision find what the hub's cache holds, without a network."""
    lm = load("lm_mamba1_tied", torch.float32)
    take(route, lm.save_pretrained, tmp_path / "source")
    fake_hub(tmp_path / "cache", tmp_path / "source", reference)
    revision = None if reference == "main" else reference
    how: dict[str, Any] = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    again = load_pretrained("state-spaces/tiny", revision=revision, **how)
    same_weights(lm, again)
    assert again.config.to_dict() == lm.config.to_dict()
    convert_checkpoint("state-spaces/tiny", tmp_path / "out", revision=revision, **how)
    same_weights(lm, load_pretrained(tmp_path / "out"))
    with pytest.raises(CheckpointError, match="'state-spaces/tiny' at 'v2' must"):
        load_pretrained("state-spaces/tiny", revision="v2", **how)
    with pytest.raises(CheckpointError, match="must have a config.json that can be reached"):
        load_pretrained("state-spaces/other", **how)


def test_hf_home_and_the_offline_flag_are_honoured(tmp_path: Path):
    """The environment that other tools obey is obeyed here."""
    fake_hub(tmp_path / "hub", LM / "lm_mamba1_tied", "refs/pr/1")
    code = (
        "import anymamba.io; from anymamba.models import MambaLM;"
        "lm = MambaLM.from_pretrained('state-spaces/tiny', revision='refs/pr/1');"
        "print(sum(x.numel() for x in lm.parameters()))"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    lm = load("lm_mamba1_tied")
    assert int(run.stdout) == sum(x.numel() for x in lm.parameters())


def test_shards_that_the_cache_lacks_are_named(tiny: MambaLM, tmp_path: Path):
    """An interrupted download is not half a model."""
    take("shards", lambda *args, **how: save_pretrained(tiny, *args, **how), tmp_path / "source")
    snapshot = fake_hub(tmp_path / "cache", tmp_path / "source", "main")
    gone = sorted(snapshot.glob("model-*"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"'{gone.name}' cannot be reached"):
        load_pretrained("state-spaces/tiny", cache_dir=tmp_path / "cache", local_files_only=True)


def test_a_folder_is_never_looked_up_on_the_hub(
    tiny: MambaLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A folder named like a repository wins, and needs no huggingface_hub at all."""
    save_pretrained(tiny, tmp_path / "state-spaces" / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    same_weights(tiny, load_pretrained("state-spaces/tiny"))
    with pytest.raises(CheckpointError, match=r"pip install 'anymamba\[io\]'"):
        load_pretrained("state-spaces/other")


def test_without_safetensors_the_hint_says_what_to_install(
    tiny: MambaLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Writing needs no package; reading says which one is missing."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    save_pretrained(tiny, tmp_path)
    with pytest.raises(CheckpointError, match=r"pip install 'anymamba\[io\]'"):
        load_pretrained(tmp_path)
