"""The language model: forward, pieces, steps and packs are one function; the loss is exact."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from anymamba.errors import AnyMambaError
from anymamba.models import MambaConfig, MambaLM, preset
from anymamba.nn import KVCache, ModelCache
from laws import assert_same

ATTENTION = {"causal": True, "num_heads": 4, "num_heads_kv": 2, "rotary_emb_dim": 4, "d_conv": 3}
CASES = {
    "mamba1": {"ssm_cfg": {"d_state": 4}},
    "mamba1 layernorm untied": {
        "ssm_cfg": {"d_state": 4}, "rms_norm": False, "tie_embeddings": False,
    },
    "mamba2 mlp": {
        "ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 8}, "d_intermediate": 20,
    },
    "mamba3": {"ssm_cfg": {"layer": "Mamba3", "d_state": 8, "headdim": 8}, "d_intermediate": 20},
    "mamba3 quaternion double": {
        "ssm_cfg": {
            "layer": "Mamba3", "d_state": 8, "headdim": 8, "rotation": "quaternion",
            "pathway": "double", "is_mimo": True, "mimo_rank": 2, "learnable_init_state": True,
        }
    },
    "hybrid": {
        "ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 8},
        "attn_layer_idx": [1],
        "attn_cfg": ATTENTION,
    },
    "attention only": {
        "attn_layer_idx": [0, 1], "attn_cfg": ATTENTION | {"mlp_dim": 20, "d_conv": 0},
    },
}  # fmt: skip


def model(name, dtype=torch.float64):
    torch.manual_seed(0)
    config = MambaConfig(**({"d_model": 16, "n_layer": 2, "vocab_size": 37} | CASES[name]))
    lm = MambaLM(config).to(dtype)
    for parameter in lm.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return lm


def tokens(batch, length, seed=1):
    return torch.randint(37, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(lm, loss):
    lm.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}


def assert_same_gradients(want, got):
    assert want.keys() == got.keys()
    for name in want:
        assert_same(want[name], got[name], "grad", name)


@pytest.mark.parametrize("name", CASES)
def test_forward_equals_pieces_equals_steps(name):
    """Logits, caches and all parameter gradients agree, from odd pieces to single tokens."""
    lm, ids = model(name), tokens(2, 9)
    head = torch.randn(2, 9, 40, generator=torch.Generator().manual_seed(2)).double()
    want = lm(ids)
    want_grads = gradients(lm, (want * head).sum())
    for cuts in ([0, 1, 5, 9], list(range(10))):
        cache, logits = None, []
        for start, stop in pairwise(cuts):
            if cache is not None and len(cuts) == 10:
                piece, cache = lm.step(ids[:, start], cache)
                piece = piece.unsqueeze(1)
            else:
                piece, cache = lm.prefill(ids[:, start:stop], cache)
            logits.append(piece)
        got = torch.cat(logits, 1)
        assert_same(want.detach(), got.detach())
        assert cache.position_b.tolist() == [9, 9]
        assert_same_gradients(want_grads, gradients(lm, (got * head).sum()))


@pytest.mark.parametrize("name", CASES)
def test_packed_and_labelled_equal_separate(name):
    """cu_seqlens and seq_idx give each sequence the logits and the cache it has by itself."""
    lm, ids = model(name), tokens(1, 11)
    first, second = lm.prefill(ids[:, :4]), lm.prefill(ids[:, 4:])
    want = torch.cat([first.logits, second.logits], 1)
    logits, cache = lm.prefill(ids, cu_seqlens=torch.tensor([0, 4, 4, 11]))
    assert_same(want.detach(), logits.detach())
    assert cache.position_b.tolist() == [4, 0, 7]
    following = tokens(1, 1, seed=3)[:, 0]
    assert_same(lm.step(following, second.cache).logits, lm.step(following, cache.rows([2])).logits)
    labels = torch.tensor([[5] * 4 + [2] * 7])
    logits, cache = lm.prefill(ids, seq_idx=labels)
    assert_same(want.detach(), logits.detach())
    assert cache.position_b.tolist() == [7]
    assert_same(lm.step(following, second.cache).logits, lm.step(following, cache).logits)


@pytest.mark.parametrize("name", ["mamba2 mlp", "hybrid", "attention only"])
def test_rows_of_different_lengths_decode_together(name):
    """Caches of prompts of different lengths, joined, step like each prompt alone."""
    lm, prompts = model(name), [tokens(1, 3), tokens(1, 7, seed=4), tokens(1, 1, seed=5)]
    caches = [lm.prefill(prompt).cache for prompt in prompts]
    joined = ModelCache.join(caches)
    assert joined.position_b.tolist() == [3, 7, 1]
    for turn in range(3):
        ids = tokens(3, 1, seed=10 + turn)[:, 0]
        logits, joined = lm.step(ids, joined)
        for row in range(3):
            alone, caches[row] = lm.step(ids[row : row + 1], caches[row])
            assert_same(alone.detach(), logits[row : row + 1].detach())
    kept = joined.rows([2, 0])
    ids = tokens(2, 4, seed=20)
    logits, _ = lm.prefill(ids, kept)
    for row, source in enumerate((2, 0)):
        assert_same(
            lm.prefill(ids[row : row + 1], caches[source]).logits.detach(),
            logits[row : row + 1].detach(),
        )


@pytest.mark.parametrize("name", ["mamba1", "mamba3", "mamba3 quaternion double"])
def test_step_in_place_equals_step(name):
    """`step_` writes into the given memory what `step` returns."""
    lm, ids = model(name), tokens(2, 4)
    cache = lm.empty_cache(2)
    pure = cache.clone()
    held = {name: tensor.data_ptr() for name, tensor in cache.to_tensors().items()}
    for place in range(4):
        got = lm.step_(ids[:, place], cache)
        want, pure = lm.step(ids[:, place], pure)
        assert_same(want.detach(), got)
    for name, tensor in cache.to_tensors().items():
        assert tensor.data_ptr() == held[name]
        assert_same(pure.to_tensors()[name].detach().double(), tensor.double())


def test_step_in_place_refuses_growing_caches():
    """Attention caches grow, so they cannot be updated in place."""
    lm = model("hybrid")
    assert any(isinstance(layer, KVCache) for layer in lm.empty_cache(1).layers)
    with pytest.raises(AnyMambaError, match="Use step"):
        lm.step_(tokens(1, 1)[0], lm.empty_cache(1))


@pytest.mark.parametrize("name", ["mamba3", "mamba1 layernorm untied"])
@pytest.mark.parametrize("packed", [None, "cu_seqlens", "seq_idx"])
def test_loss_in_pieces_equals_cross_entropy(name, packed, monkeypatch):
    """Value and gradients are those of the full logits; no prediction crosses a border."""
    monkeypatch.setattr("anymamba.ops.loss.api.PIECE_BYTES", 1)
    lm, ids = model(name), tokens(1 if packed == "cu_seqlens" else 3, 40)
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    options = {}
    if packed == "cu_seqlens":
        options = {"cu_seqlens": torch.tensor([0, 13, 40])}
        targets[:, 12] = -100
    elif packed == "seq_idx":
        labels = torch.zeros_like(ids)
        labels[1, 20:] = 1
        options = {"seq_idx": labels}
        targets[1, 19] = -100
    want = F.cross_entropy(lm(ids, **options).flatten(0, 1), targets.flatten())
    want_grads = gradients(lm, want)
    got = lm.loss(ids, **options)
    assert_same(want.detach(), got.detach())
    assert_same_gradients(want_grads, gradients(lm, got))


@pytest.mark.parametrize("borders", [(0, 0, 9), (0, 0, 0, 4, 4, 9), (0, 9, 9)])
def test_an_empty_sequence_costs_no_prediction(borders):
    """Sequences without tokens change nothing, at the front, between others or at the end."""
    lm, ids = model("mamba1"), tokens(1, 9)
    filled = torch.tensor(sorted(set(borders)))
    want = lm.loss(ids, cu_seqlens=filled)
    assert_same(want.detach(), lm.loss(ids, cu_seqlens=torch.tensor(borders)).detach())


def test_the_bias_of_another_head_counts():
    """A head that was put in with a bias has it in the loss as in the logits."""
    lm, ids = model("mamba1 layernorm untied"), tokens(2, 9)
    lm.lm_head = torch.nn.Linear(16, lm.lm_head.out_features, dtype=torch.float64)
    torch.nn.init.normal_(lm.lm_head.bias)
    want = F.cross_entropy(lm(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert_same(want.detach(), lm.loss(ids).detach())


@pytest.mark.parametrize("plain", [True, False], ids=["plain head", "hooked head"])
def test_loss_keeps_its_precision_and_counts_only_targets(plain):
    """A float64 model has a float64 loss behind any head; without a target the loss is 0."""
    lm, ids = model("mamba3"), tokens(2, 9)
    if not plain:
        lm.lm_head.register_forward_hook(lambda *_: None)
    want = F.cross_entropy(lm(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert lm.loss(ids).dtype == torch.float64
    assert_same(want.detach(), lm.loss(ids).detach())
    assert_same(want.detach(), lm.loss(ids.int()).detach())
    nothing = torch.full_like(ids, -100)
    assert lm.loss(ids, nothing).item() == 0.0
    assert lm.prefill_loss(ids, nothing).loss.item() == 0.0


def test_num_last_tokens_limits_the_head():
    """The head runs only where asked, with the same numbers."""
    lm, ids = model("mamba3"), tokens(2, 9)
    assert_same(lm(ids)[:, -2:], lm(ids, num_last_tokens=2))
    assert lm.prefill(ids, num_last_tokens=1).logits.shape == (2, 1, 40)


def test_initialisation_is_official_with_the_mlp_factor():
    """Embeddings 0.02, zero biases, branches scaled by the root of their number."""
    torch.manual_seed(0)
    config = MambaConfig(
        d_model=64, n_layer=8, vocab_size=500, d_intermediate=256,
        ssm_cfg={"layer": "Mamba2", "d_state": 16, "headdim": 16},
    )  # fmt: skip
    lm = MambaLM(config)
    assert abs(float(lm.backbone.embedding.weight.detach().std()) - 0.02) < 2e-3
    assert lm.lm_head.weight is lm.backbone.embedding.weight
    layer = lm.backbone.layers[0]
    for linear in (layer.mixer.out_proj, layer.mlp.fc2):
        bound = 1 / math.sqrt(linear.in_features) / math.sqrt(2 * config.n_layer)
        largest = float(linear.weight.detach().abs().max())
        assert 0.95 * bound < largest <= bound


def test_half_precision_model_keeps_the_stream_in_float32():
    """A bfloat16 model is close to its float32 twin, logits come in bfloat16."""
    torch.manual_seed(0)
    config = MambaConfig(
        d_model=32,
        n_layer=4,
        vocab_size=37,
        ssm_cfg={"layer": "Mamba3", "d_state": 16, "headdim": 8},
    )
    half = MambaLM(config, dtype=torch.bfloat16)
    full = MambaLM(config)
    full.load_state_dict({name: p.float() for name, p in half.state_dict().items()})
    ids = tokens(2, 33)
    logits = half(ids)
    assert logits.dtype == torch.bfloat16
    assert_same(full(ids).bfloat16(), logits)
    assert half.loss(ids).dtype == torch.float32


def test_rejects_bad_ids_and_caches():
    """Mistakes name the argument and what to do."""
    lm = model("mamba1")
    with pytest.raises(AnyMambaError, match="token ids must be an int32 or int64 tensor"):
        lm(torch.zeros(1, 3))
    with pytest.raises(AnyMambaError, match=r"axes \(batch, sequence\)"):
        lm(tokens(1, 3)[0])
    with pytest.raises(AnyMambaError, match="must be a ModelCache"):
        lm.step(tokens(1, 1)[0], lm.empty_cache(1).layers[0])
    cache = lm.empty_cache(1)
    with pytest.raises(AnyMambaError, match="the cache has 1 layers"):
        lm.step(tokens(1, 1)[0], ModelCache(cache.layers[:1], cache.position_b))


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        ("mamba-130m", 129_135_360, 242),
        ("mamba2-130m", 128_989_632, 218),
        ("mamba3-siso-187m", 186_849_600, 146),
        ("mamba3-mimo-187m", 187_291_968, 182),
    ],
)
def test_presets_have_the_published_sizes(name, parameters, tensors):
    """Counts of the four public checkpoints, on modules that hold no memory."""
    lm = MambaLM(preset(name), device="meta")
    assert sum(p.numel() for p in lm.parameters()) == parameters
    assert len(set(lm.state_dict()) - {"lm_head.weight"}) == tensors
