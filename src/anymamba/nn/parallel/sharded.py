"""Parameters sharded over ranks with FSDP2, sensitive ones in float32 inside the forward too."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from anymamba.nn.block import Block
from anymamba.nn.stack_layer import Layer

__all__ = ["shard_parameters"]

# What else than `forward` starts a pass through a model; `loss` goes through `prefill_loss`.
METHODS = ("prefill", "step", "prefill_loss", "loss_sum")


def shard_parameters(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Shard a model's parameters with `fully_shard`: a group per layer, and one for the rest.

    With `param_dtype`, torch casts a whole group, so each layer has two: its matrices and norms
    compute in that dtype, and what a block owns itself (`A_log`, `D`, `dt_bias`, `B_bias`,
    `C_bias`, `mimo_*`, initial states) stays as it is.

    Args:
        model: changed in place.
        mesh: one axis, over which parameters are sharded and gradients averaged.
        param_dtype: of the gathered matrices; None gathers what there is.
        reduce_dtype: of the gradients on their way; None is that of the gradients.
    """
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    cast = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    kept = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    how: dict[str, Any] = {"mesh": mesh}
    units = [m for m in model.modules() if isinstance(m, Layer)]
    for unit in units:
        if param_dtype is None:
            fully_shard(unit, mp_policy=cast, **how)
            continue
        fully_shard(_castable(unit), mp_policy=cast, **how)
        fully_shard(unit, mp_policy=kept, **how)
    # What has verbs is entered by them, also from a module around it.
    root = next((m for m in model.modules() if any(hasattr(m, name) for name in METHODS)), model)
    fully_shard(root, mp_policy=cast, **how)
    for name in METHODS:
        if hasattr(root, name):
            register_fsdp_forward_method(root, name)


def _castable(unit: nn.Module) -> list[nn.Module]:
    """Return the modules of a layer that own parameters and are no blocks."""
    return [
        module
        for module in unit.modules()
        if not isinstance(module, Block) and any(True for _ in module.parameters(recurse=False))
    ]
