"""Attention keeps the laws of a block, and refuses what it cannot do."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from stack_cases import WIDTH, build, config, inputs
from torch import Tensor

from anymamba.errors import BackendError, CacheError, ConfigError, DtypeError, PackingError
from anymamba.models import MambaConfig, MambaLM
from anymamba.nn import MHA
from anymamba.ops import SsdPath
from laws import assert_same, randn

# One empty sequence at each end and in the middle; the longest is not the first.
BORDERS = [0, 0, 2, 3, 3, 9, 9]
LABELS = [4] * 2 + [1] + [4] * 6
CAUSAL = pytest.mark.parametrize("causal", [True, False])
PACKED = pytest.mark.parametrize(
    "packed", [{"cu_seqlens": torch.tensor(BORDERS)}, {"seq_idx": torch.tensor([LABELS])}], ids=list
)


def attention(**options: Any) -> MHA:
    """Return a small layer with grouped keys in float64."""
    torch.manual_seed(0)
    options = {"num_heads": 4, "num_heads_kv": 2, "rotary_emb_dim": 2, **options}
    return MHA(WIDTH, **options, dtype=torch.float64)


def one_by_one(module: Any, x_1sd: Tensor) -> Tensor:
    """Run each sequence of `BORDERS` by itself."""
    pieces = pairwise(BORDERS)
    return torch.cat([module(x_1sd[:, a:b]) for a, b in pieces if a < b], 1)


def assert_packed_is_separate(module: Any, packed: dict[str, Tensor]) -> None:
    """Compare outputs and the gradients of the input and of every parameter."""
    x_1sd = inputs(1, BORDERS[-1]).requires_grad_()
    leaves = {"x": x_1sd, **dict(module.named_parameters())}
    head_1sd = randn(*x_1sd.shape, seed=7)
    results = []
    for y_1sd in (one_by_one(module, x_1sd), module(x_1sd, **packed)):
        grads = torch.autograd.grad((y_1sd * head_1sd).sum(), list(leaves.values()))
        results.append((y_1sd.detach(), dict(zip(leaves, grads, strict=True))))
    (separate_1sd, separate_grads), (packed_1sd, packed_grads) = results
    assert_same(separate_1sd, packed_1sd)
    for name, grad in separate_grads.items():
        assert_same(grad, packed_grads[name], "grad", name)


@CAUSAL
@PACKED
@pytest.mark.parametrize("d_conv", [0, 3])
def test_packed_sequences_do_not_meet_in_attention(causal, packed, d_conv):
    """A packed sequence attends to itself only: not to its neighbours, and not to padding."""
    assert_packed_is_separate(attention(causal=causal, d_conv=d_conv), packed)


@CAUSAL
@PACKED
def test_packed_sequences_do_not_meet_in_a_stack_with_attention(causal, packed):
    """The same below and above Mamba layers."""
    layer = {"layer": "MHA", "num_heads": 2, "rotary_emb_dim": 4, "causal": causal}
    mamba = {"layer": "Mamba2", "d_state": 4, "headdim": 4, "chunk_size": 4}
    stack = build(config(n_layer=None, ssm_cfg={}, layers=[layer, mamba, layer]))
    assert_packed_is_separate(stack, packed)


@pytest.mark.parametrize(
    ("borders", "batch", "error", "message"),
    [
        ([0, 2, 9], 2, PackingError, "batch must be 1; got 2"),
        ([0, 5, 2, 9], 1, PackingError, "must not decrease; got 5 then 2"),
        ([0, 2, 8], 1, PackingError, "must end at the sequence length 9; got 8"),
        ([0, 2, 12], 1, PackingError, "must end at the sequence length 9; got 12"),
        ([1, 9], 1, PackingError, "must start at 0; got 1"),
        ([0.0, 2.0, 9.0], 1, DtypeError, "int32 or int64 tensor; got torch.float32"),
    ],
)
def test_attention_checks_the_borders(borders, batch, error, message):
    """Borders that do not describe the row are refused, without a convolution too."""
    with pytest.raises(error, match=f"^MHA: .*{message}"):
        attention()(inputs(batch, 9), cu_seqlens=torch.tensor(borders))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads must be positive; got 0"),
        ({"num_heads_kv": 0}, "num_heads_kv must be positive; got 0"),
        ({"head_dim": 0}, "head_dim must be positive; got 0"),
        ({"d_conv": -1}, "d_conv must not be negative; got -1. 0 means none"),
        ({"mlp_dim": -1}, "mlp_dim must not be negative; got -1"),
        ({"rotary_emb_dim": -2}, "rotary_emb_dim must be even, from 0 to head_dim"),
    ],
)
def test_attention_refuses_sizes_that_no_layer_has(options, message):
    """A wrong size is met in the constructor, by name."""
    with pytest.raises(ConfigError, match=message):
        attention(**options)


def test_attention_knows_the_names_of_implementations():
    """An unknown name is refused; known ones and paths, which stacks hand to all layers, serve."""
    x_bsd = inputs(2, 5)
    module = attention(causal=True)
    with pytest.raises(ConfigError, match=r"MHA: impl must be one of .* got 'foo'"):
        module(x_bsd, impl="foo")
    for impl in ("auto", "portable", "native", "reference"):
        assert_same(module(x_bsd).detach(), module(x_bsd, impl=impl).detach())
    assert_same(module(x_bsd).detach(), module(x_bsd, path=SsdPath.serial()).detach())


@pytest.mark.parametrize("field", ["k_bhst", "v_bhst", "conv_bvk"])
def test_attention_refuses_a_cache_of_another_dtype(field):
    """As in the other blocks: a float64 state does not enter a float32 layer unseen."""
    module = attention(causal=True, d_conv=3).float()
    cache = module.prefill(inputs(2, 5).float())[1]
    cache = cache._replace(**{field: getattr(cache, field).double()})
    with pytest.raises(CacheError, match=f"{field} of the cache must be torch.float32; got"):
        module.prefill(inputs(2, 5).float(), cache)
    with pytest.raises(CacheError, match=f"{field} of the cache must be torch.float32; got"):
        module.step(inputs(2, 5)[:, 0].float(), cache)


def test_attention_that_looks_ahead_does_not_stream():
    """causal=False has a forward; prefill and step refuse from the first call on."""
    module = attention(causal=False)
    x_bsd = inputs(2, 5)
    assert module(x_bsd).shape == x_bsd.shape
    with pytest.raises(BackendError, match=r"MHA\.prefill: causal must be True"):
        module.prefill(x_bsd)
    with pytest.raises(BackendError, match=r"MHA\.step: causal must be True"):
        module.step(x_bsd[:, 0], module.empty_cache(2))


def test_a_model_that_looks_ahead_says_so_before_the_first_token():
    """A model with causal=False computes losses and logits, and refuses to generate."""
    lm = MambaLM(
        MambaConfig(
            d_model=8,
            n_layer=2,
            vocab_size=16,
            ssm_cfg={"layer": "Mamba2", "d_state": 4, "headdim": 4},
            attn_layer_idx=[1],
            attn_cfg={"num_heads": 2},
        )
    )
    ids_bs = torch.arange(6).view(1, 6)
    assert lm(ids_bs).shape[:2] == (1, 6)
    with pytest.raises(BackendError, match=r"MHA\.prefill: causal must be True"):
        lm.prefill(ids_bs)
