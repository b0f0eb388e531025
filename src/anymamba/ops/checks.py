"""Questions every operator asks of its arguments before it computes anything."""

import torch
from torch import Tensor

from anymamba import settings
from anymamba.errors import ConfigError, DeviceError, DtypeError, NonFiniteError
from anymamba.ops.numerics import accumulate_dtype

__all__ = [
    "check_device",
    "check_floats",
    "check_groups",
    "check_impl",
    "check_one_precision",
    "check_option",
    "guard",
]

IMPLS = ("auto", "portable", "native", "reference")


def check_option(where: str, holds: bool, name: str, what: str, given: float) -> None:
    """Raise `ConfigError` with the name of an option unless the condition on it holds.

    Example:
        >>> check_option("draw", 0 < 0.5 <= 1, "top_p", "above 0 and at most 1", 0.5)
    """
    if not holds:
        raise ConfigError(f"{where}: {name} must be {what}; got {given}.")


def check_floats(
    where: str,
    activations: dict[str, Tensor | None],
    accumulators: dict[str, Tensor | None] | None = None,
) -> torch.dtype:
    """Check that tensors are floating point, on one device, and of matching dtypes.

    Activations share one dtype; accumulators (decays, states) have that dtype or the wider one
    they are computed in.

    Returns:
        The dtype to compute in.
    """
    # Spelled so that the compiler of torch 2.6 can trace it: it knows no union of dictionaries.
    tensors = {**activations, **(accumulators or {})}
    for name, tensor in tensors.items():
        _check_tensor(where, name, tensor)
    first_name, first = next((n, t) for n, t in activations.items() if t is not None)
    compute = _compute_dtype(where, first_name, first)
    for name, tensor in activations.items():
        if tensor is not None and tensor.dtype != first.dtype:
            _compute_dtype(where, name, tensor)
            raise DtypeError(
                f"{where}: {name} must have the dtype of {first_name} ({first.dtype}); "
                f"got {tensor.dtype}. Cast one of them with .to()."
            )
    for name, tensor in (accumulators or {}).items():
        if tensor is not None and tensor.dtype not in (first.dtype, compute):
            _compute_dtype(where, name, tensor)
            raise DtypeError(
                f"{where}: {name} must be {compute} beside {first_name} of {first.dtype}; "
                f"got {tensor.dtype}. Cast it with .to({compute})."
            )
    for name, tensor in tensors.items():
        if tensor is not None:
            check_device(where, name, tensor, first_name, first)
    return compute


def check_device(where: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Check that a tensor is on the device of another one."""
    if tensor.device != other.device:
        raise DeviceError(
            f"{where}: {name} must be on the device of {other_name} ({other.device}); "
            f"got {tensor.device}. Move it with .to({str(other.device)!r})."
        )


def _compute_dtype(where: str, name: str, tensor: Tensor) -> torch.dtype:
    try:
        return accumulate_dtype(tensor.dtype)
    except DtypeError as error:
        raise DtypeError(f"{where}: {name}: {error}") from None


def _check_tensor(where: str, name: str, tensor: object) -> None:
    if tensor is not None and not isinstance(tensor, Tensor):
        raise DtypeError(f"{where}: {name} must be a tensor; got {type(tensor).__name__}.")


def check_groups(where: str, heads: int, groups: int) -> None:
    """Check that heads divide evenly over the groups of B and C."""
    if heads % groups:
        raise ConfigError(
            f"{where}: groups must divide heads; got {groups} groups for {heads} heads."
        )


def check_impl(where: str, impl: str) -> None:
    """Check that an implementation name is one we know."""
    if impl not in IMPLS:
        raise ConfigError(f"{where}: impl must be one of {IMPLS}; got {impl!r}.")


def guard(where: str, **tensors: Tensor | None) -> None:
    """Raise `NonFiniteError` on NaN or infinity, if those guards are on; else do nothing.

    Traced and mapped tensors have no values to look at: guards are silent under `torch.compile`
    and inside `torch.func` transforms.
    """
    switches = settings.current()
    if not (switches.deny_nan or switches.deny_inf):
        return
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return
    for name, tensor in tensors.items():
        if tensor is None or tensor.device.type == "meta":
            continue
        if switches.deny_nan and bool(tensor.isnan().any()):
            raise NonFiniteError(f"{where}: {name} contains NaN (settings.deny_nan is on).")
        if switches.deny_inf and bool(tensor.isinf().any()):
            raise NonFiniteError(f"{where}: {name} contains infinity (settings.deny_inf is on).")


def check_one_precision(where: str, **tensors: Tensor | None) -> torch.dtype:
    """Check that tensors are floating point, on one device, and accumulate in one dtype.

    Half types and float32 may mix, because all of them accumulate in float32.

    Returns:
        The dtype to compute in.
    """
    for name, tensor in tensors.items():
        _check_tensor(where, name, tensor)
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first_name, first = next(iter(given.items()))
    compute = _compute_dtype(where, first_name, first)
    for name, tensor in given.items():
        if _compute_dtype(where, name, tensor) != compute:
            raise DtypeError(
                f"{where}: {name} ({tensor.dtype}) must accumulate in {compute} like "
                f"{first_name} ({first.dtype}). Cast one of them with .to()."
            )
        check_device(where, name, tensor, first_name, first)
    return compute
