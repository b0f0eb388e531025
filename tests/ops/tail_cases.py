"""The kinds of tail that blocks have, as functions of a list of tensors."""

from collections.abc import Callable

import torch
from torch import Tensor

from anymamba.ops import gated_tail
from laws import randn

# Mamba-2 without and with norm, in both orders; Mamba-3 with one rank and several.
CASES = ["gate", "norm_before", "norm_after", "ranks", "ranks_norm_before", "ranks_norm_after"]


def ranks_of(case: str) -> int:
    return 3 if case.startswith("ranks") else 1


def make(
    case: str, batch: int, length: int, heads: int, width: int, dtype: torch.dtype
) -> list[Tensor]:
    """Return y, x, z, skip, then spread and merge, then the weight, as far as the case has them."""
    ranks = ranks_of(case)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    tensors = [
        randn(batch, length, ranks, heads, width, seed=1, dtype=dtype),
        randn(batch, length, ranks, heads, width, seed=2, dtype=dtype),
        randn(batch, length, heads, width, seed=3, dtype=dtype),
        randn(heads, seed=4, dtype=wide),
    ]
    if ranks > 1:
        tensors += [randn(ranks, heads, width, seed=seed, dtype=wide) for seed in (5, 6)]
    if "norm" in case:
        tensors.append(randn(heads * width, seed=7, dtype=wide))
    return tensors


def tail(case: str, impl: str) -> Callable[..., list[Tensor]]:
    """Return the case as a function of the tensors that `make` returned."""

    def way(y, x, z, skip, *rest):
        options = {}
        if ranks_of(case) > 1:
            options = {"spread_mhp": rest[0], "merge_mhp": rest[1]}
        if "norm" in case:
            # Groups of one head for several ranks, else one group of all channels.
            group = y.shape[-1] if ranks_of(case) > 1 else None
            options |= {"weight_i": rest[-1], "group_size": group}
            options["norm_before_gate"] = case.endswith("before")
        return [gated_tail(y, x, z, skip, impl=impl, **options)]

    return way
