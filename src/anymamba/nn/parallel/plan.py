"""The one entry: a model and a mesh in, a parallel model out."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from anymamba.errors import ConfigError
from anymamba.nn.parallel.context import context_parallel
from anymamba.nn.parallel.replicas import average_gradients
from anymamba.nn.parallel.sharded import shard_parameters
from anymamba.nn.parallel.tensor import tensor_parallel

__all__ = ["AXES", "data_mesh", "line_mesh", "parallelize"]

WHERE = "parallelize"
AXES = ("dp", "cp", "tp")


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    shard: bool = False,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
) -> nn.Module:
    """Spread a model over a mesh of processes, whose axes say over what.

    "tp" splits heads and hidden widths, "cp" the sequence, "dp" the batch. Parameters are
    replicated over "dp" and "cp" (DDP), or sharded over them (FSDP2); either way gradients are
    averaged over both, so a loss must be that of all ranks: see `LanguageLoss`.

    Args:
        model: changed in place; the same weights on every rank.
        mesh: with axes named "dp", "cp" and "tp", or some of them.
        shard: shard parameters instead of replicating them.
        param_dtype: what matrices are cast to for computing; with `shard` only.
        reduce_dtype: of gradients on their way; with `shard` only.

    Returns:
        The model itself, or around it `DistributedDataParallel`, whose `forward` must be called.

    Raises:
        ConfigError: the mesh has an unknown axis, or none; or an option has no effect.
        BackendError: a layer cannot be split that way.
    """
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in names if name not in AXES]
    if unknown or not names:
        raise ConfigError(
            f"{WHERE}: the axes of the mesh must be named {', '.join(AXES)}; got {names}. "
            "Use init_device_mesh(device, shape, mesh_dim_names=...)."
        )
    if param_dtype is not None and not shard:
        raise ConfigError(
            f"{WHERE}: param_dtype needs shard=True; replicas compute in their own dtype. "
            "Use autocast."
        )
    data = data_mesh(mesh)
    if data is not None and data.size() == 1 and not shard:
        data = None  # nobody to agree with
    if "tp" in names:
        tensor_parallel(model, mesh["tp"])
    if "cp" in names:
        context_parallel(model, mesh["cp"].get_group())
    if data is None:
        return model
    if shard:
        shard_parameters(model, data, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        return model
    if "tp" in names:
        average_gradients(model, data.get_group())
        return model
    return nn.parallel.DistributedDataParallel(model, process_group=data.get_group())


def data_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the axis over which gradients are averaged, "dp" and "cp" in one; None without."""
    return _joined(mesh, ("dp", "cp"))


def line_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return all ranks of a mesh on one axis."""
    line = _joined(mesh, AXES)
    assert line is not None
    return line


def _joined(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    here = tuple(name for name in mesh.mesh_dim_names or () if name in names)
    if not here:
        return None
    return mesh[here[0]] if len(here) == 1 else mesh[here]._flatten("_".join(here))
