"""Small stacks with random weights, and how two ways of running one are compared."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.nn import MultiGate, ResidualConfig, Stack, StackConfig
from laws import assert_same, randn

# A way runs a stack on x (batch, sequence, d_model) from a cache, or from none, to a cache.
Way = Callable[[Stack, Tensor, Any], tuple[Tensor, Any]]

WIDTH = 8
FAMILIES: dict[str, dict[str, Any]] = {
    "mamba1": {"layer": "Mamba1", "d_state": 4},
    "mamba2": {"layer": "Mamba2", "d_state": 4, "headdim": 4, "chunk_size": 4},
    "mamba3": {"layer": "Mamba3", "d_state": 8, "headdim": 4, "chunk_size": 4},
}
ATTENTION = {"num_heads": 2, "causal": True, "rotary_emb_dim": 4}
GATES = ResidualConfig(multi_gate=MultiGate(n_stream=2, init_bias=-0.5, init_bias_step=0.3))


def config(family: str = "mamba3", real: int = 2, **options: Any) -> StackConfig:
    """Return the config of a small stack."""
    return StackConfig(
        **{"d_model": WIDTH, "n_layer": real, "ssm_cfg": FAMILIES[family], **options}
    )


def build(stack_config: StackConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> Stack:
    """Return a stack in which no weight is zero or equal to another."""
    torch.manual_seed(seed)
    stack = Stack(stack_config, dtype=dtype)
    with torch.no_grad():
        for place, (name, weight) in enumerate(stack.named_parameters()):
            noise = randn(*weight.shape, seed=100 + place, dtype=dtype)
            if "table" in name or name.startswith("gates"):
                weight.add_(noise)
            elif "norm" in name:
                weight.add_(0.3 * noise)
    return stack


def inputs(batch: int, length: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return random inputs."""
    return randn(batch, length, WIDTH, seed=seed, dtype=dtype)


def fields(cache: Any) -> dict[str, Tensor]:
    """Return a cache's floating tensors by name; angles as points on the circle."""
    return {
        name: torch.stack([x.cos(), x.sin()]) if name.endswith("angle_bha") else x
        for name, x in cache.to_tensors().items()
        if x.is_floating_point()
    }


class Outcome(NamedTuple):
    """What a way computes: values by name, gradients of one loss by name, and the counts."""

    values: dict[str, Tensor]
    grads: dict[str, Tensor]
    counts: dict[str, list[int]]


def outcome(stack: Stack, way: Way, x_bsd: Tensor, cache: Any = None) -> Outcome:
    """Run a way; differentiate a random head on the output and on every field of the state."""
    x_bsd = x_bsd.detach().clone().requires_grad_()
    y_bsd, end = way(stack, x_bsd, cache)
    values = {"y": y_bsd, **fields(end)}
    loss = sum(
        (value * randn(*value.shape, seed=50 + place, dtype=value.dtype)).sum()
        for place, value in enumerate(values.values())
    )
    leaves = {"x": x_bsd, **{n: p for n, p in stack.named_parameters() if p.requires_grad}}
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    counts = {n: x.tolist() for n, x in end.to_tensors().items() if not x.is_floating_point()}
    detached = {name: value.detach() for name, value in values.items()}
    return Outcome(detached, dict(zip(leaves, grads, strict=True)), counts)


def assert_agree(expected: Outcome, actual: Outcome) -> None:
    """Assert equal values, equal gradients and equal counts, name by name."""
    assert expected.values.keys() == actual.values.keys()
    for name, value in expected.values.items():
        assert_same(value, actual.values[name], "value", name)
    for name, grad in expected.grads.items():
        assert_same(grad, actual.grads[name], "grad", f"gradient of {name}")
    assert expected.counts == actual.counts


def whole(length: int | None = None) -> Way:
    """Return the way that runs everything in one call."""
    return lambda stack, x_bsd, cache: stack.prefill(x_bsd, cache, length=length)


def in_pieces(*lengths: int, length: int | None = None) -> Way:
    """Return the way that hands the state from piece to piece; a piece of 1 is a step."""

    def way(stack: Stack, x_bsd: Tensor, cache: Any) -> tuple[Tensor, Any]:
        cache = stack.empty_cache(x_bsd.shape[0], length=length) if cache is None else cache
        ys: list[Tensor] = []
        for piece in x_bsd.split(list(lengths), 1):
            if piece.shape[1] == 1:
                y_bd, cache = stack.step(piece[:, 0], cache)
                ys.append(y_bd.unsqueeze(1))
            else:
                y_bsd, cache = stack.prefill(piece, cache)
                ys.append(y_bsd)
        return torch.cat(ys, 1), cache

    return way


def stepwise(length: int | None = None) -> Way:
    """Return the way that feeds one token at a time."""

    def way(stack: Stack, x_bsd: Tensor, cache: Any) -> tuple[Tensor, Any]:
        return in_pieces(*[1] * x_bsd.shape[1], length=length)(stack, x_bsd, cache)

    return way


def parameter_gradients(stack: Stack, loss: Tensor) -> dict[str, Tensor | None]:
    """Return the gradient of each trained parameter; None where the loss does not reach it."""
    named = [(name, weight) for name, weight in stack.named_parameters() if weight.requires_grad]
    weights: Sequence[Tensor] = [weight for _, weight in named]
    grads = torch.autograd.grad(loss, weights, allow_unused=True)
    return dict(zip([name for name, _ in named], grads, strict=True))
