"""Parity with transformers: random models saved there run here alike, and the other way round."""

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import edit, greedy
from torch import Tensor

from anymamba.errors import ConfigError
from anymamba.io import convert_checkpoint, load_pretrained, read_config, save_pretrained
from anymamba.models import MambaConfig, MambaLM
from anymamba.nn import Mamba
from laws import assert_same, assert_ways_agree, randn

# transformers' own imports and calls warn; its warnings are not ours to judge.
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 53, "state_size": 8}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
HEADS = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16}


class Theirs(NamedTuple):
    """A model of transformers: family, options of its config."""

    family: str
    options: dict[str, Any]


THEIRS = {
    "mamba": Theirs("Mamba", {}),
    "mamba-untied": Theirs("Mamba", {"tie_word_embeddings": False, "time_step_rank": 5}),
    "mamba-bias": Theirs("Mamba", {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3}),
    "mamba2": Theirs("Mamba2", HEADS),
    "mamba2-tied": Theirs("Mamba2", {**HEADS, "tie_word_embeddings": True, "use_bias": True}),
    "falcon": Theirs("FalconMamba", {}),
    "falcon-wide": Theirs(
        "FalconMamba", {"expand": 16, "intermediate_size": 96, "mixer_rms_eps": 1e-3}
    ),
}
# Our models that exist there.
OURS = {
    "mamba1": {},
    "mamba1-untied": {"tie_embeddings": False, "ssm_cfg": {"d_state": 5, "dt_rank": 3}},
    "mamba2": {"ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 16}},
    "mamba2-options": {
        "ssm_cfg": {"layer": "Mamba2", "headdim": 8, "expand": 3, "bias": True, "chunk_size": 8},
        "tie_embeddings": False,
    },
    "falcon": {"ssm_cfg": {"bcdt_rms_eps": 1e-6}},
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


def shake(model: torch.nn.Module) -> None:
    """Move every parameter, so that greedy text is not one token for ever."""
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if "out_proj" in name else 0.2
            parameter += scale * torch.randn(parameter.shape, generator=random)


def build(transformers: Any, case: Theirs, **more: Any) -> Any:
    """Return a random model of transformers."""
    torch.manual_seed(0)
    options = SIZES | NO_TOKENS | case.options | more
    config = getattr(transformers, f"{case.family}Config")(**options)
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).eval()
    shake(model)
    return model


def their_text(model: Any, prompt_bs: Tensor) -> Tensor:
    return model.generate(prompt_bs, max_new_tokens=64, do_sample=False, eos_token_id=None)


def assert_parity(lm: MambaLM, theirs: Any) -> None:
    """The same logits on a long sequence, and the same 64 greedy tokens."""
    ids_bs = torch.randint(0, 53, (2, 65), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(ids_bs).logits
        assert expected.abs().max() > 1
        assert float((lm(ids_bs) - expected).abs().max()) <= 1e-4
        text, _ = greedy(lm, ids_bs[:, :9], 64)
    assert torch.equal(their_text(theirs, ids_bs[:, :9]), text)
    assert text[:, 9:].unique().numel() > 3


@pytest.mark.parametrize("name", THEIRS)
def test_models_of_transformers_run_here_alike(name: str, transformers: Any, tmp_path: Path):
    """Random models saved there give the same logits and the same greedy text here."""
    theirs = build(transformers, THEIRS[name])
    theirs.save_pretrained(tmp_path / "theirs")
    lm = load_pretrained(tmp_path / "theirs")
    assert_parity(lm, theirs)
    # Through our layout and back again, which is a way of resaving for them.
    convert_checkpoint(tmp_path / "theirs", tmp_path / "ours", format="bin")
    assert_parity(load_pretrained(tmp_path / "ours"), theirs)
    convert_checkpoint(tmp_path / "ours", tmp_path / "back", layout="transformers")
    again = type(theirs).from_pretrained(tmp_path / "back").eval()
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key


@pytest.mark.parametrize("name", OURS)
def test_our_models_run_in_transformers_alike(name: str, transformers: Any, tmp_path: Path):
    """Random models saved in their layout load there, in both file formats, and are whole."""
    torch.manual_seed(0)
    lm = MambaLM(MambaConfig(d_model=32, n_layer=2, vocab_size=50, **OURS[name]))
    shake(lm)
    for shard in (None, 9000):
        save_pretrained(lm, tmp_path, layout="transformers", max_shard_bytes=shard)
        theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True
        )
        assert not any(report.values()), report
        ids_bs = torch.arange(50)[None]
        with torch.no_grad():
            expected, actual = lm(ids_bs), theirs.eval()(ids_bs).logits
        assert expected.abs().max() > 1
        assert float((expected - actual).abs().max()) <= 1e-4
    text, _ = greedy(lm, ids_bs[:, :9], 64)
    # There the padded rows of the vocabulary are tokens like any other: forbid them.
    theirs.generation_config.suppress_tokens = list(range(50, 56))
    assert torch.equal(their_text(theirs, ids_bs[:, :9]), text)
    assert read_config(tmp_path).to_dict() == lm.config.to_dict()


def test_an_edited_transformers_config_wins_over_our_notes(transformers: Any, tmp_path: Path):
    """`anymamba.json` only adds to a `config.json` that still says the same."""
    lm = MambaLM(MambaConfig(d_model=32, n_layer=1, vocab_size=50))
    save_pretrained(lm, tmp_path, layout="transformers")
    assert read_config(tmp_path).vocab_size == 50
    edit(tmp_path, residual_in_fp32=False)
    assert read_config(tmp_path).vocab_size == 56
    assert not read_config(tmp_path).residual_in_fp32
    (tmp_path / "anymamba.json").write_text("damaged")
    assert read_config(tmp_path).vocab_size == 56


def test_the_limit_of_dt_survives_every_spelling(transformers: Any, tmp_path: Path):
    """transformers 5 writes infinity as an object, older ones as JSON's extension."""
    theirs = build(transformers, THEIRS["mamba2"], time_step_limit=(0.3, float("inf")))
    theirs.save_pretrained(tmp_path)
    assert read_config(tmp_path).ssm_cfg["dt_limit"] == (0.3, float("inf"))
    edit(tmp_path, time_step_limit=[0.3, float("inf")])
    lm = load_pretrained(tmp_path)
    assert lm.config.ssm_cfg["dt_limit"] == (0.3, float("inf"))
    ids_bs = torch.arange(40)[None]
    with torch.no_grad():
        assert float((lm(ids_bs) - theirs(ids_bs).logits).abs().max()) <= 1e-4
    save_pretrained(lm, tmp_path, layout="transformers")
    again = type(theirs).from_pretrained(tmp_path)
    assert tuple(again.config.time_step_limit) == (0.3, float("inf"))


def test_groups_are_announced(transformers: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """transformers normalises over all groups at once; the difference is said, not hidden."""
    theirs = build(transformers, THEIRS["mamba2"], n_groups=2)
    theirs.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="anymamba.io"):
        lm = load_pretrained(tmp_path)
    assert [record.name for record in caplog.records] == ["anymamba.io"]
    assert "Logits differ" in caplog.text
    for layer in lm.backbone.layers:
        layer.mixer.norm.group_size = None  # pyright: ignore
    ids_bs = torch.arange(40)[None]
    with torch.no_grad():
        assert float((lm(ids_bs) - theirs(ids_bs).logits).abs().max()) <= 1e-4


def test_keys_that_transformers_leaves_out_have_its_defaults(transformers: Any, tmp_path: Path):
    """A config with the family alone describes what transformers would build from it."""
    for family in ("Mamba", "Mamba2", "FalconMamba"):
        theirs = getattr(transformers, f"{family}Config")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": theirs.model_type}))
        config, default = read_config(tmp_path), theirs()
        assert config.d_model == default.hidden_size
        assert config.n_layer == default.num_hidden_layers
        assert config.padded_vocab_size == default.vocab_size
        assert config.tie_embeddings == default.tie_word_embeddings
        lm = MambaLM(config, device="meta")
        with torch.device("meta"):
            model = getattr(transformers, f"{family}ForCausalLM")(default)
        shapes = {key: value.shape for key, value in model.state_dict().items()}
        shapes["backbone.embedding.weight"] = shapes.pop("backbone.embeddings.weight")
        assert {key: value.shape for key, value in lm.state_dict().items()} == shapes


@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_normed_bcdt_steps_equal_whole_on_values_states_and_gradients(length: int):
    """The norms of FalconMamba are part of every verb: whole, pieces and steps agree."""
    torch.manual_seed(0)
    block = Mamba(8, d_state=4, dt_rank=3, bcdt_rms_eps=1e-3, dtype=torch.float64)
    cache = block.empty_cache(2)
    inputs = [
        randn(2, length, 8, seed=1),
        randn(*cache.conv_bik.shape, seed=2),
        randn(*cache.ssm_bir.shape, seed=3),
        *(parameter.detach() for parameter in block.parameters()),
    ]
    names = [name for name, _ in block.named_parameters()]

    def run(way: Any) -> Any:
        def call(u_bsd: Tensor, conv_bik: Tensor, ssm_bir: Tensor, *values: Tensor) -> Any:
            held = dict(zip(names, values, strict=True))
            start = type(cache)(conv_bik, ssm_bir)
            whole = torch.func.functional_call(Runner(block, way), held_names(held), (u_bsd, start))
            return whole[0], *whole[1]

        return call

    assert_ways_agree(run(in_one), run(in_steps), inputs)
    assert_ways_agree(run(in_one), run(in_pieces), inputs)


class Runner(torch.nn.Module):
    """A block behind one way of running it, so that its parameters can be given from outside."""

    def __init__(self, block: Mamba, way: Any) -> None:
        super().__init__()
        self.block, self.way = block, way

    def forward(self, u_bsd: Tensor, cache: Any) -> Any:
        return self.way(self.block, u_bsd, cache)


def held_names(held: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"block.{name}": value for name, value in held.items()}


def in_one(block: Mamba, u_bsd: Tensor, cache: Any) -> Any:
    return block.prefill(u_bsd, cache)


def in_pieces(block: Mamba, u_bsd: Tensor, cache: Any) -> Any:
    parts = []
    for piece_bsd in u_bsd.split(23, dim=1):
        y_bsd, cache = block.prefill(piece_bsd, cache)
        parts.append(y_bsd)
    return torch.cat(parts, 1), cache


def in_steps(block: Mamba, u_bsd: Tensor, cache: Any) -> Any:
    parts = []
    for u_bd in u_bsd.unbind(1):
        y_bd, cache = block.step(u_bd, cache)
        parts.append(y_bd)
    return torch.stack(parts, 1), cache


def test_the_norm_of_bcdt_divides_by_the_root_mean_square():
    """Scaling the projection of dt, B and C changes nothing, once eps is out of sight."""
    torch.manual_seed(0)
    block = Mamba(8, d_state=4, bcdt_rms_eps=1e-15, dtype=torch.float64)
    plain = Mamba(8, d_state=4, dtype=torch.float64)
    plain.load_state_dict(block.state_dict())
    u_bsd = randn(2, 9, 8, seed=1)
    with torch.no_grad():
        expected, without = block(u_bsd), plain(u_bsd)
        block.x_proj.weight *= 3
        assert_same(expected, block(u_bsd))
    assert not torch.allclose(expected, without, rtol=1e-2)
    assert "bcdt_rms_eps=1e-15" in repr(block)


def test_the_norm_of_bcdt_is_float32_beside_half_types():
    """Squares that overflow float16 do not reach the output."""
    torch.manual_seed(0)
    block = Mamba(8, d_state=4, bcdt_rms_eps=1e-6)
    with torch.no_grad():
        block.x_proj.weight *= 2000
    u_bsd = randn(1, 5, 8, seed=1, dtype=torch.float32, scale=8)
    expected = block(u_bsd)
    assert_same(expected.half(), block.half()(u_bsd.half()))


def test_an_eps_that_is_not_positive_is_refused():
    """A root without it could divide by zero."""
    with pytest.raises(ConfigError, match="bcdt_rms_eps must be positive"):
        Mamba(8, bcdt_rms_eps=0.0)
