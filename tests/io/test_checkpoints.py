"""Checkpoints: the golden models, and every layout there and back."""

import json
import shutil
import sys
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    FIELDS,
    IN_TRANSFORMERS,
    LM,
    NAMES,
    activation,
    assert_golden,
    edit,
    load,
    same_weights,
    take,
)

from anymamba.io import convert_checkpoint, load_pretrained, read_config, save_pretrained
from anymamba.models import MambaConfig, MambaLM

WEIGHTS = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}
ROUTES = [
    *((name, route) for name in NAMES for route in ("safetensors", "bin", "shards")),
    *((name, route) for name in IN_TRANSFORMERS for route in ("transformers", "transformers-bin")),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_official_checkpoints_give_official_numbers(name: str, dtype: torch.dtype):
    """Logits, loss, the gradient of every parameter and greedy tokens are the official ones."""
    assert_golden(name, load(name, dtype), dtype)


@pytest.mark.parametrize(("name", "route"), ROUTES)
def test_every_layout_keeps_the_model(name: str, route: str, tmp_path: Path):
    """Saved or converted, there and back: the same config, bits and numbers."""
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
    size = (tmp_path / "half" / WEIGHTS[format]).stat().st_size
    assert size < 0.7 * (folder / "pytorch_model.bin").stat().st_size


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_a_loaded_model_owns_its_memory(format: str, tiny: MambaLM, tmp_path: Path):
    """Writing into the file, in place, changes nothing in a model that was loaded from it."""
    save_pretrained(tiny, tmp_path, format=format)
    lm = load_pretrained(tmp_path)
    file = tmp_path / WEIGHTS[format]
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
    official = make_dataclass("MambaConfig", FIELDS)
    load(name).save_pretrained(tmp_path, format="bin")
    saved = json.loads((tmp_path / "config.json").read_text())
    source = json.loads((LM / name / "config.json").read_text())
    assert set(saved) == set(FIELDS)
    if activation(name):
        source["ssm_cfg"]["a_activation"] = activation(name)
    assert vars(official(**saved)) == source
    notes = json.loads((tmp_path / "anymamba.json").read_text())
    assert notes["version"]
    assert notes.get("a_activation") == activation(name)


def test_the_activation_of_a_is_announced_once_unless_known(tmp_path: Path):
    """Official Mamba-3 configs do not tell it; ours do, and an argument settles it."""
    name = "lm_mamba3_siso_mlp_softplus"
    with pytest.warns(UserWarning, match="a_activation='softplus'") as told:
        assumed = load_pretrained(LM / name)
    assert len(told) == 1
    assert assumed.config.ssm_cfg["a_activation"] == "heavy_tail"
    given = load_pretrained(LM / name, a_activation="softplus")
    save_pretrained(given, tmp_path)
    again = load_pretrained(tmp_path)
    assert again.config.ssm_cfg["a_activation"] == "softplus"
    other = load_pretrained(tmp_path, a_activation="heavy_tail")
    assert other.config.ssm_cfg["a_activation"] == "heavy_tail"
    ids_bs = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(given(ids_bs), again(ids_bs))
        assert torch.equal(assumed(ids_bs), other(ids_bs))
        assert not torch.allclose(given(ids_bs), assumed(ids_bs), rtol=1e-2)


def test_conversion_takes_the_tokenizer_along(folder: Path, tmp_path: Path):
    """A converted model can be used with the same text and the same special tokens."""
    (folder / "tokenizer.json").write_text('{"model": 1}')
    convert_checkpoint(folder, tmp_path / "one", layout="transformers")
    edit(tmp_path / "one", eos_token_id=11)
    convert_checkpoint(tmp_path / "one", tmp_path / "two", layout="transformers")
    assert (tmp_path / "two" / "tokenizer.json").read_text() == '{"model": 1}'
    assert json.loads((tmp_path / "two" / "config.json").read_text())["eos_token_id"] == 11
    assert read_config(tmp_path / "two") == read_config(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for large pages")
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_loaded_weights_begin_at_a_large_page(tmp_path: Path, scheme: str | None):
    """What `from_pretrained` returns decodes at the speed of such pages."""
    MambaLM(MambaConfig(d_model=512, n_layer=1, vocab_size=4200)).save_pretrained(tmp_path)
    lm = MambaLM.from_pretrained(tmp_path, quantize=scheme)
    table: Any = lm.backbone.embedding
    weight = table.weight if scheme is None else table.values
    assert weight.nbytes >= 2 << 20
    assert weight.data_ptr() % (2 << 20) == 0
