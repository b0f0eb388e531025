"""The processes of a run: one, or those that `torchrun` started, on a mesh.

All of them read the same batches and compute the same losses. The first one writes: metrics, facts,
pictures and the model. Everybody calls the same methods here, in the same order.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from anymamba.errors import AnyMambaError, BackendError, ConfigError
from anymamba.io import named_device, usable_device
from anymamba.nn import data_mesh, line_mesh
from anymamba.train.joining import join_group
from anymamba.train.recipe_sections import ParallelRecipe

__all__ = ["Ranks", "clip_gradients", "open_ranks"]

WHERE = "train"
T = TypeVar("T")
# Ranks that start together still import at different speeds.
JOINING = timedelta(minutes=10)
# The first rank may have a large corpus to read and to turn into tokens.
PREPARING = timedelta(days=1)


class Ranks:
    """This process and its fellows.

    Args:
        mesh: axes "dp", "cp" and "tp"; None is a process alone.
        patient: the group in which everybody waits for long work of the first process.
    """

    def __init__(
        self, mesh: DeviceMesh | None = None, patient: "dist.ProcessGroup | None" = None
    ) -> None:
        """Find this process's place."""
        self.mesh, self._patient = mesh, patient
        self.line = None if mesh is None else line_mesh(mesh)
        self.rank = 0 if mesh is None else dist.get_rank()
        self.size = 1 if mesh is None else dist.get_world_size()

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """Return this process's own device of a kind: "cuda" is another card for each.

        Raises:
            ConfigError: there is no such device here.
        """
        device = named_device(WHERE, name)
        if self.mesh is not None and device.type != "cpu" and device.index is None:
            place = dist.get_node_local_rank(0)  # pyright: ignore[reportPrivateImportUsage]
            device = torch.device(device.type, place)
        return usable_device(WHERE, device)

    def ask_first(self, ask: Callable[[], T]) -> T:
        """Return what the first process finds, on every process; its errors are everybody's.

        Raises:
            AnyMambaError: what the first process raised; `ConfigError` with its words on others.
        """
        return self._ask_first(ask, None)

    def after_first(self, make: Callable[[], T]) -> T:
        """Let the first process make something, however long it takes, and then the others.

        What is made stays on its process. Errors of the first one are everybody's.
        """
        made: list[T] = []
        self._ask_first(lambda: made.append(make()), self._patient)
        return made[0] if made else make()

    def _ask_first(self, ask: Callable[[], T], group: "dist.ProcessGroup | None") -> T:
        if self.mesh is None:
            return ask()
        found: list[Any] = [None, None]
        raised: AnyMambaError | None = None
        if self.is_first:
            try:
                found[0] = ask()
            except AnyMambaError as error:
                raised, found[1] = error, str(error)
        dist.broadcast_object_list(found, src=0, group=group)
        if raised is not None:
            raise raised
        if found[1] is not None:
            raise ConfigError(found[1])
        return found[0]

    def largest(self, *values: float) -> list[float]:
        """Return the largest of each value over the processes, the same everywhere."""
        if self.mesh is None:
            return list(values)
        device = "cpu" if dist.get_backend() == "gloo" else self.mesh.device_type
        found = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def explain(self, error: BaseException) -> BackendError | None:
        """Say in our words that a process was lost; None if the error is about something else."""
        is_about_ranks = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError)
            and not isinstance(error, AnyMambaError)
            and any(word in str(error).lower() for word in ("gloo", "nccl", "connection", "peer"))
        )
        if self.mesh is None or not is_about_ranks:
            return None
        first_line = str(error).strip().splitlines()[0][:200]
        return BackendError(
            f"{WHERE}: all {self.size} ranks must answer; rank {self.rank} lost contact: "
            f"{first_line}. Look for the first error of another rank, then go on with --resume."
        )

    def close(self) -> None:
        """Leave the group."""
        if self.mesh is not None and dist.is_initialized():
            dist.destroy_process_group()


def open_ranks(recipe: ParallelRecipe, device: str) -> Ranks:
    """Join the processes that `torchrun` started, or stay alone where nobody did.

    Args:
        recipe: how the ranks are used.
        device: kind of device, which decides how they talk.

    Raises:
        ConfigError: the number of ranks does not fit the recipe, or there is no such device.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched():
        if recipe.cp * recipe.tp > 1 or recipe.shard:
            raise ConfigError(
                "parallel: cp, tp and shard need several ranks; this is a process alone. "
                "Start it as: torchrun --nproc-per-node N -m anymamba train ..."
            )
        return Ranks()
    kind = named_device(WHERE, device).type
    if not dist.is_initialized():
        join_group("nccl" if kind == "cuda" else "gloo", JOINING)
    size, inner = dist.get_world_size(), recipe.cp * recipe.tp
    if size % inner:
        raise ConfigError(
            f"parallel: cp * tp must divide the number of ranks; got {recipe.cp} * {recipe.tp} and "
            f"{size} ranks. Correct parallel.cp and parallel.tp, or --nproc-per-node."
        )
    axes = {"dp": size // inner}
    axes |= {name: many for name, many in (("cp", recipe.cp), ("tp", recipe.tp)) if many > 1}
    mesh = init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))
    _bound_time(mesh, recipe.timeout)
    patient = dist.new_group(timeout=PREPARING, backend="gloo")
    assert isinstance(patient, dist.ProcessGroup)
    return Ranks(mesh, patient)


def _bound_time(mesh: DeviceMesh, seconds: float) -> None:
    """Give all groups the run's limit; torch would wait half an hour in those of a mesh."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    groups = [None, *(mesh[name].get_group() for name in mesh.mesh_dim_names or ())]
    if (data := data_mesh(mesh)) is not None:
        groups.append(data.get_group())
    groups.append(line_mesh(mesh).get_group())
    for group in groups:
        _set_pg_timeout(timedelta(seconds=seconds), group)


def clip_gradients(model: nn.Module, limit: float) -> float:
    """Scale all gradients down to a norm of at most `limit`; returns the norm before.

    torch's own function refuses a mixture of plain and distributed gradients, so each kind is
    measured on its own.
    """
    from torch.distributed.tensor import DTensor

    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is not None:
            kind = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
            kinds.setdefault(kind, []).append(parameter)
    norms = []
    for parameters in kinds.values():
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for parameters in kinds.values():
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, total)
    return float(total)
