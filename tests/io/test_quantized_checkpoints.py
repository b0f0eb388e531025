"""Quantised checkpoints: the same integers whichever way they come to a file or a model."""

import json
import weakref

import pytest
import torch
from torch import nn

from anymamba.errors import CheckpointError, ConfigError
from anymamba.io import convert_checkpoint, load_pretrained, save_pretrained
from anymamba.models import MambaConfig, MambaLM, quantize_lm, scheme_of
from anymamba.nn import QuantizedLinear, quantize

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
def test_conversion_holds_the_integers_of_one_file(scheme, tmp_path, monkeypatch):
    """A layer is quantised when its file is written and let go with it: shards bound the memory."""
    limit, made, most, largest = 4000, [], 0, 0

    def watched(weight, scheme):
        nonlocal most, largest
        most = max(most, sum(x.nbytes for reference in made if (x := reference()) is not None))
        tensors = quantize(weight, scheme)
        made.extend(map(weakref.ref, tensors))
        largest = max(largest, sum(x.nbytes for x in tensors))
        return tensors

    monkeypatch.setattr("anymamba.io.quantized.quantize", watched)
    lm = make(tied=False)
    save_pretrained(lm, tmp_path / "plain")
    convert_checkpoint(
        tmp_path / "plain", tmp_path / "shards", quantize=scheme, max_shard_bytes=limit
    )
    # What is larger than a file has one of its own.
    assert most <= max(limit, largest)
    assert sum(file.stat().st_size for file in (tmp_path / "shards").iterdir()) > 4 * limit
    assert_same_model(quantize_lm(lm, scheme), load_pretrained(tmp_path / "shards"))


@SCHEMES
def test_a_weight_that_no_scale_can_hold_leaves_the_old_files(scheme, tmp_path):
    """What fails in a later file takes back those before it."""
    lm = make()
    convert = {"quantize": scheme, "max_shard_bytes": 4000}
    save_pretrained(lm, tmp_path / "plain")
    convert_checkpoint(tmp_path / "plain", tmp_path / "new", **convert)
    before = {file.name: file.read_bytes() for file in (tmp_path / "new").iterdir()}
    with torch.no_grad():
        lm.backbone.layers[1].mixer.out_proj.weight[0, 0] = torch.nan
    save_pretrained(lm, tmp_path / "plain")
    with pytest.raises(ConfigError, match="finite"):
        convert_checkpoint(tmp_path / "plain", tmp_path / "new", **convert)
    assert {file.name: file.read_bytes() for file in (tmp_path / "new").iterdir()} == before


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


def test_models_quantised_in_parts_are_refused(tmp_path):
    """They count as quantised; the message names a layer, what it is, and what to do."""
    lm = quantize_lm(make(tied=False), "int8")
    head = nn.Linear(32, 50, bias=False)
    lm.lm_head = head
    assert scheme_of(lm) == "int8"
    with pytest.raises(CheckpointError, match=r"lm_head is a Linear\. Quantise that layer too"):
        save_pretrained(lm, tmp_path / "parts")
    with pytest.raises(ConfigError, match="int8 already"):
        quantize_lm(lm, "int8")
    lm.lm_head = QuantizedLinear.of(head, "int4")
    lm.backbone.layers[0].mixer.in_proj = head
    where = r"layers\.0\.mixer\.in_proj is a Linear \(and 1 more\)"
    with pytest.raises(CheckpointError, match=where):
        save_pretrained(lm, tmp_path / "parts")
    assert not (tmp_path / "parts").exists()


def test_a_layer_replaced_by_another_of_its_kind_is_saved(tmp_path):
    """What the message advises works; where head and embedding are tied, they must stay equal."""
    head = nn.Linear(32, 50, bias=False)
    for tied in (False, True):
        lm = quantize_lm(make(tied), "int8")
        lm.lm_head = QuantizedLinear.of(head, "int8")
        if tied:
            with pytest.raises(CheckpointError, match="tie_embeddings=False"):
                save_pretrained(lm, tmp_path / "tied")
        else:
            save_pretrained(lm, tmp_path / "untied")
            assert_same_model(lm, load_pretrained(tmp_path / "untied"))
