"""The case table of the blocks' laws, and how two ways of running a block are compared."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.nn import Mamba, Mamba2, Mamba3
from laws import assert_same, randn

# A way runs a block on u (batch, sequence, d_model) from a cache, or from none, to a cache.
Way = Callable[[Any, Tensor, Any], tuple[Tensor, Any]]


class Case(NamedTuple):
    """A block of the table: its class and constructor arguments."""

    name: str
    kind: type
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return self.name


# Chunks of 4: even the short sequences of the tests cross several borders.
MAMBA1 = {
    "default": {},
    "bias": {"bias": True},
    "no_conv_bias": {"conv_bias": False},
    "conv1": {"d_conv": 1},
    "conv2": {"d_conv": 2},
    "dt_rank": {"dt_rank": 3},
}
MAMBA2 = {
    "default": {},
    "auto_chunk": {"chunk_size": None},
    "ngroups2": {"ngroups": 2},
    "skip_per_channel": {"D_has_hdim": True},
    "no_norm": {"rmsnorm": False},
    "norm_before_gate": {"norm_before_gate": True, "ngroups": 2},
    "dt_limit": {"dt_limit": (0.3, 1.1)},
    "half_ssm": {"d_ssm": 8},
    "bias": {"bias": True},
    "no_conv_bias": {"conv_bias": False, "d_conv": 2},
    "conv1": {"d_conv": 1},
    "init_state": {"learnable_init_state": True},
}
MIMO2 = {"is_mimo": True, "mimo_rank": 2}
MAMBA3 = {
    "siso": {},
    "mimo1": {"is_mimo": True, "mimo_rank": 1},
    "mimo2": MIMO2,
    "mimo3": {"is_mimo": True, "mimo_rank": 3, "chunk_size": None},
    "ngroups2": {"ngroups": 2},
    "rope0": {"rope_fraction": 0.0},
    "rope1": {"rope_fraction": 1.0},
    "rope1_mimo2": {"rope_fraction": 1.0, **MIMO2},
    "out_norm": {"is_outproj_norm": True},
    "softplus": {"a_activation": "softplus"},
    "range": {"rotation_range": 1.37},
    "dt_limit": {"dt_limit": (0.3, 1.1)},
    "init_state": {"learnable_init_state": True},
    "bias": {"bias": True},
    "all": {
        "ngroups": 2,
        "is_outproj_norm": True,
        "rotation_range": 1.37,
        "learnable_init_state": True,
        "bias": True,
        **MIMO2,
    },
}


def _table() -> list[Case]:
    size = {"d_model": 8, "d_state": 4}
    heads = {"d_model": 8, "headdim": 4, "chunk_size": 4}
    cases = [Case(f"mamba1-{n}", Mamba, {**size, **kw}) for n, kw in MAMBA1.items()]
    cases += [
        Case(f"mamba2-{n}", Mamba2, {**heads, "d_state": 4, **kw}) for n, kw in MAMBA2.items()
    ]
    for rotation in ("complex", "quaternion"):
        for pathway in ("single", "double"):
            fixed = {**heads, "d_state": 8, "rotation": rotation, "pathway": pathway}
            prefix = f"mamba3-{rotation}-{pathway}"
            cases += [Case(f"{prefix}-{n}", Mamba3, {**fixed, **kw}) for n, kw in MAMBA3.items()]
    return cases


CASES = _table()
BY_NAME = {case.name: case for case in CASES}
# Every family, both rotations, both pathways, ranks, groups, initial state: for the longer tests.
FEW = [
    BY_NAME[name]
    for name in (
        "mamba1-default",
        "mamba2-ngroups2",
        "mamba2-init_state",
        "mamba3-complex-single-siso",
        "mamba3-complex-single-all",
        "mamba3-quaternion-single-mimo2",
        "mamba3-quaternion-double-all",
    )
]


def build(case: Case, dtype: torch.dtype = torch.float64) -> Any:
    """Return the case's block with random weights: steps near 1, decays that forget in tens."""
    block = case.kind(**case.kwargs, dtype=dtype)
    with torch.no_grad():
        for place, (name, weight) in enumerate(block.named_parameters()):
            noise = randn(*weight.shape, seed=100 + place, dtype=dtype)
            if name.endswith("weight") and weight.dim() > 1:
                weight.copy_(noise * weight[0].numel() ** -0.5)
            elif name in ("A_log", "init_states") or (name.endswith("bias") and weight.dim() == 1):
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(1 + 0.3 * noise)
    return block


def tokens(block: Any, batch: int, length: int, seed: int = 0) -> Tensor:
    """Return random inputs in the block's dtype."""
    return randn(batch, length, block.d_model, seed=seed, dtype=block.in_proj.weight.dtype)


def random_cache(block: Any, rows: int, seed: int = 1) -> Any:
    """Return a cache in which no field is zero; a quaternion is random and of unit length."""
    seeds = iter(range(1000 * seed, 1000 * seed + 10))
    cache = block.empty_cache(rows).detach()
    return on_sphere(cache.map(lambda x: randn(*x.shape, seed=next(seeds), dtype=x.dtype)))


def on_sphere(cache: Any) -> Any:
    """Scale quaternions to unit length, so that gradients are compared where rotations live."""
    rotation = getattr(cache, "rotation", None)
    if rotation is None or rotation.quaternion_bhj4 is None:
        return cache
    q_bhj4 = rotation.quaternion_bhj4
    unit = q_bhj4 / q_bhj4.norm(dim=-1, keepdim=True)
    return cache._replace(rotation=rotation._replace(quaternion_bhj4=unit))


def join(caches: Sequence[Any]) -> Any:
    """Stack the rows of several caches."""
    parts = [cache.to_tensors() for cache in caches]
    rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return type(caches[0]).from_tensors(rows)


def fields(cache: Any) -> dict[str, Tensor]:
    """Return a cache's tensors by name; angles as points on the circle."""
    tensors = {} if cache is None else cache.to_tensors()
    return {
        name: torch.stack([x.cos(), x.sin()]) if name.endswith("angle_bha") else x
        for name, x in tensors.items()
    }


class Outcome(NamedTuple):
    """What a way computes: values by name, and gradients of one loss by name."""

    values: dict[str, Tensor]
    grads: dict[str, Tensor]


def outcome(block: Any, way: Way, u_bsd: Tensor, cache: Any = None) -> Outcome:
    """Run a way; differentiate a random head on the output and on every field of the final cache.

    Gradients are those of the input, of every parameter and of every field of the given cache.
    """
    u_bsd = u_bsd.detach().clone().requires_grad_()
    start = None if cache is None else cache.detach().clone().requires_grad_()
    y_bsd, end = way(block, u_bsd, on_sphere(start))
    values = {"y": y_bsd, **fields(end)}
    loss = sum(
        (value * randn(*value.shape, seed=50 + place, dtype=value.dtype)).sum()
        for place, value in enumerate(values.values())
    )
    leaves = {"u": u_bsd, **dict(block.named_parameters())}
    if start is not None:
        leaves |= {f"initial {name}": tensor for name, tensor in start.to_tensors().items()}
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return Outcome(
        {name: value.detach() for name, value in values.items()},
        dict(zip(leaves, grads, strict=True)),
    )


def assert_agree(expected: Outcome, actual: Outcome) -> None:
    """Assert equal values and equal gradients, name by name."""
    assert expected.values.keys() == actual.values.keys()
    for name, value in expected.values.items():
        assert_same(value, actual.values[name], "value", name)
    assert expected.grads.keys() == actual.grads.keys()
    for name, grad in expected.grads.items():
        assert_same(grad, actual.grads[name], "grad", f"gradient of {name}")


def whole(**options: Any) -> Way:
    """Return the way that runs everything in one call."""
    return lambda block, u_bsd, cache: block.prefill(u_bsd, cache, **options)


def in_pieces(*lengths: int) -> Way:
    """Return the way that hands the cache from piece to piece."""

    def way(block: Any, u_bsd: Tensor, cache: Any) -> tuple[Tensor, Any]:
        ys = []
        for piece in u_bsd.split(list(lengths), 1):
            y, cache = block.prefill(piece, cache)
            ys.append(y)
        return torch.cat(ys, 1), cache

    return way


def stepwise(block: Any, u_bsd: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Feed one token at a time."""
    cache = block.empty_cache(u_bsd.shape[0]) if cache is None else cache
    ys = []
    for u_bd in u_bsd.unbind(1):
        y_bd, cache = block.step(u_bd, cache)
        ys.append(y_bd)
    return torch.stack(ys, 1), cache
