"""Quantised checkpoints: the same integers whichever way they come to a file or a model."""

import json

import pytest
import torch

from anymamba.errors import CheckpointError, ConfigError
from anymamba.io import convert_checkpoint, load_pretrained, save_pretrained
from anymamba.models import MambaConfig, MambaLM, quantize_lm, scheme_of

pytest.importorskip("safetensors")
SCHEMES = pytest.mark.parametrize("scheme", ["int8", "int4"])


def make(tied: bool = True) -> MambaLM:
    torch.manual_seed(0)
    options = {"layer": "Mamba3", "headdim": 8, "d_state": 16}
    return MambaLM(
        MambaConfig(
            d_model=32, n_layer=2, vocab_size=50, ssm_cfg=options, d_intermediate=40,
            tie_embeddings=tied,
        )
    )  # fmt: skip


def assert_same_model(want: MambaLM, got: MambaLM) -> None:
    assert scheme_of(got) == scheme_of(want)
    theirs = got.state_dict()
    for name, tensor in want.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
    assert not want.config.tie_embeddings or (
        got.lm_head.values.data_ptr() == got.backbone.embedding.values.data_ptr()
    )


@SCHEMES
@pytest.mark.parametrize("tied", [True, False])
def test_all_ways_give_the_same_integers(scheme, tied, tmp_path):
    """Quantised at load, in memory and saved, or by conversion: one model."""
    plain, saved, converted = (tmp_path / name for name in ("plain", "saved", "converted"))
    lm = make(tied)
    save_pretrained(lm, plain)
    at_load = MambaLM.from_pretrained(str(plain), quantize=scheme)
    want = quantize_lm(lm, scheme)
    assert_same_model(want, at_load)
    save_pretrained(want, saved)
    assert_same_model(want, load_pretrained(saved))
    assert_same_model(want, load_pretrained(saved, quantize=scheme))
    convert_checkpoint(plain, converted, quantize=scheme)
    assert_same_model(want, load_pretrained(converted))


@SCHEMES
def test_the_header_names_the_scheme(scheme, tmp_path):
    """The scheme stands in the header of every safetensors file, shards included."""
    from safetensors import safe_open

    save_pretrained(quantize_lm(make(), scheme), tmp_path, max_shard_bytes=4000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        with safe_open(str(file), framework="pt") as reader:
            assert reader.metadata()["anymamba_quantize"] == scheme
    assert scheme_of(load_pretrained(tmp_path)) == scheme


def test_another_layout_is_refused(tmp_path):
    """Integers that lie in another order would be other weights: the header tells."""
    from safetensors.torch import load_file, save_file

    save_pretrained(quantize_lm(make(), "int8"), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file), file, metadata={"anymamba_quantize": "int8"})
    with pytest.raises(CheckpointError, match="quantise the original again"):
        load_pretrained(tmp_path)


def test_files_are_smaller(tmp_path):
    """An int4 file has less than a third of the float32 one's bytes."""
    sizes = {}
    for scheme in (None, "int8", "int4"):
        lm = make()
        save_pretrained(lm if scheme is None else quantize_lm(lm, scheme), tmp_path)
        sizes[scheme] = (tmp_path / "model.safetensors").stat().st_size
    assert sizes["int4"] < sizes["int8"] < sizes[None] / 2


def test_half_types_stay_beside_integers(tmp_path):
    """`dtype` is that of what is not quantised, and of what comes out."""
    save_pretrained(quantize_lm(make(), "int8"), tmp_path)
    lm = load_pretrained(tmp_path, dtype=torch.bfloat16)
    assert lm.backbone.norm_f.weight.dtype == torch.bfloat16
    assert lm.lm_head.weight.dtype == torch.bfloat16
    assert lm.lm_head.scales.dtype == torch.bfloat16


def test_contradictions_are_refused(tmp_path):
    """Another scheme than the file's, other layouts and formats, and unknown schemes."""
    lm = quantize_lm(make(), "int8")
    save_pretrained(lm, tmp_path / "int8")
    with pytest.raises(ConfigError, match="int8 already"):
        load_pretrained(tmp_path / "int8", quantize="int4")
    unknown = "quantize must be one of int8, int4; got 'int3'"
    with pytest.raises(ConfigError, match=f"load_pretrained: {unknown}"):
        load_pretrained(tmp_path / "int8", quantize="int3")
    with pytest.raises(ConfigError, match=f"convert_checkpoint: {unknown}"):
        convert_checkpoint(tmp_path / "int8", tmp_path / "int3", quantize="int3")
    with pytest.raises(ConfigError, match="safetensors"):
        save_pretrained(lm, tmp_path / "bin", format="bin")
    with pytest.raises(ConfigError, match="would stay integers"):
        convert_checkpoint(tmp_path / "int8", tmp_path / "float", dtype=torch.float32)
    config = tmp_path / "int8" / "config.json"
    entries = json.loads(config.read_text())
    config.write_text(json.dumps(entries | {"d_model": 64}))
    with pytest.raises(CheckpointError, match="wrong shape"):
        load_pretrained(tmp_path / "int8")
