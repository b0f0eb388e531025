"""Shared properties: two ways of computing the same thing agree on values and on gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# One table, with reasons. Errors are relative to the largest expected magnitude.
TOLERANCE = {
    # float64: two orders of summation over a few hundred terms.
    (torch.float64, "value"): 1e-11,
    (torch.float64, "grad"): 1e-10,
    # float32: rounding 6e-8 amplified by sums over a chunk; gradients add a second pass.
    (torch.float32, "value"): 1e-5,
    (torch.float32, "grad"): 1e-4,
    # bfloat16 rounds each stored number by 4e-3.
    (torch.bfloat16, "value"): 2e-2,
    (torch.bfloat16, "grad"): 4e-2,
    (torch.float16, "value"): 3e-3,
    (torch.float16, "grad"): 6e-3,
}

Way = Callable[..., Sequence[Tensor]]


def error_of(expected: Tensor, actual: Tensor) -> float:
    """Largest difference over the largest expected magnitude (or over 1 if all is tiny)."""
    assert expected.shape == actual.shape, (expected.shape, actual.shape)
    if expected.numel() == 0:
        return 0.0
    want, got = expected.detach().double(), actual.detach().double()
    scale = want.abs().max().clamp(min=1e-6)
    gap = (got - want).abs().max()
    assert bool(torch.isfinite(gap)), "not finite"
    return float(gap / scale)


def assert_same(expected: Tensor, actual: Tensor, kind: str = "value", name: str = "") -> None:
    """Assert equality within the table's tolerance for the dtype."""
    error = error_of(expected, actual)
    limit = TOLERANCE[actual.dtype, kind]
    assert error <= limit, f"{name or kind}: error {error:.3g} > {limit:.3g}"


def assert_ways_agree(expected: Way, actual: Way, inputs: Sequence[Tensor], seed: int = 0) -> None:
    """Assert that two functions of `inputs` give equal outputs and equal gradients of every input.

    The loss is a fixed random head on each output, so each output's gradient path is exercised.
    """
    results = []
    for way in (expected, actual):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = list(way(*leaves))
        random = torch.Generator().manual_seed(seed)
        heads = [torch.randn(y.shape, generator=random, dtype=torch.float64).to(y) for y in outputs]
        loss = sum((y * head).sum() for y, head in zip(outputs, heads, strict=True))
        results.append((outputs, torch.autograd.grad(loss, leaves, materialize_grads=True)))
    for place, (want, got) in enumerate(zip(results[0][0], results[1][0], strict=True)):
        assert_same(want.detach(), got.detach(), "value", f"output {place}")
    for place, (want, got) in enumerate(zip(results[0][1], results[1][1], strict=True)):
        assert_same(want, got, "grad", f"gradient of input {place}")


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    """Return normal numbers from a seed of their own."""
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=random, dtype=torch.float64) * scale).to(dtype)


def rand(
    *shape: int,
    seed: int,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return uniform numbers from a seed of their own."""
    random = torch.Generator().manual_seed(seed)
    return (low + (high - low) * torch.rand(shape, generator=random, dtype=torch.float64)).to(dtype)
