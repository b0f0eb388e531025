"""Attention keeps the laws of a block, and refuses what it cannot do."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from stack_cases import WIDTH, build, config, inputs
from torch import Tensor

from anymamba.errors import DtypeError, PackingError
from anymamba.nn import MHA
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
