"""Laws of the causal convolution beside half types: one rounding, and one rule for windows."""

import pytest
import torch
from torch import Tensor

from anymamba.ops.conv import blocked, causal_conv1d, extend_row
from laws import randn

BLOCK_ROWS = {"plain": None, "short blocks": 2, "long blocks": 17}


def gradients(inputs: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the gradients of all inputs, of a loss on the outputs and on the last window."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    outputs = causal_conv1d(*leaves, activation="silu")
    heads = [
        randn(*y.shape, seed=7 + place, dtype=torch.bfloat16) for place, y in enumerate(outputs)
    ]
    loss = sum((y * head).sum() for y, head in zip(outputs, heads, strict=True))
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("rows", BLOCK_ROWS.values(), ids=BLOCK_ROWS)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 20])
def test_half_gradients_are_rounded_once(length, rows, monkeypatch):
    """Bfloat16 gradients are the float32 ones of the same numbers, rounded; the last tokens' too.

    Those have two gradients: of their outputs, and of their copies in the last window.
    """
    if rows is not None:
        monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 0)
        monkeypatch.setattr(blocked, "MIN_ROWS", rows)
    shapes = ((2, length, 5), (5, 4), (5,), (2, 5, 4))
    inputs = [randn(*shape, seed=seed, dtype=torch.bfloat16) for seed, shape in enumerate(shapes)]
    for name, half, single in zip(
        ("x", "weight", "bias", "window"),
        gradients(inputs, torch.bfloat16),
        gradients(inputs, torch.float32),
        strict=True,
    ):
        assert torch.equal(half, single.bfloat16()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [2, 6])
def test_a_row_is_extended_alike_dense_and_packed(length, window_dtype, dtype):
    """One packed sequence gives the row, slots and window of a batch of one, in the wider dtype."""
    x_bsv = randn(1, length, 3, seed=1, dtype=dtype)
    window_bvk = randn(1, 3, 4, seed=2, dtype=window_dtype)
    dense = extend_row(x_bsv, window_bvk)
    packed = extend_row(x_bsv, window_bvk, cu_seqlens=torch.tensor([0, length]))
    assert dense.row_bSv.dtype == torch.promote_types(dtype, window_dtype)
    assert torch.equal(dense.row_bSv[:, :4], window_bvk.transpose(1, 2).to(dense.row_bSv.dtype))
    for name, one, other in zip(dense._fields, dense, packed, strict=True):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
