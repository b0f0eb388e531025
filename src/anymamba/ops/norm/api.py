"""The door to the norms: checks and precision. Pure functions, no parameters.

The arithmetic is in `blocked.py`, the mathematics in `README.md`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.errors import ConfigError, DtypeError, ShapeError
from anymamba.ops.checks import check_device, check_floats, guard
from anymamba.ops.norm.blocked import GATED_RMS_NORM, RMS_NORM, gated_norm, norm
from anymamba.ops.norm.reference import gated_rms_norm_reference, rms_norm_reference
from anymamba.ops.norm.residual import add, add_norm
from anymamba.ops.select import select_impl

__all__ = ["AddNorm", "add_layer_norm", "add_rms_norm", "gated_rms_norm", "rms_norm"]


class AddNorm(NamedTuple):
    """A normalised sum, in the dtype of x, and the sum itself: the next residual."""

    y: Tensor
    residual: Tensor


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    group_size: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Divide the last axis, or each group of it, by its root mean square and weigh it.

        y = x / sqrt(mean(x^2) + eps) * weight

    Args:
        x: any number of leading axes; statistics are float32 for half types.
        weight: one number per entry of the last axis; any floating dtype.
        eps: inside the root; positive, so that an all-zero slice has a finite gradient.
        group_size: width of a group; must divide the last axis; None means one group.
        impl: "auto", "portable", "native" or "reference".

    Returns:
        A tensor like `x`.

    Raises:
        ShapeError: `weight` does not fit the last axis.
        ConfigError: `eps` is not positive, or `group_size` does not divide the last axis.
        DtypeError: an argument is not floating point.
        BackendError: `impl` cannot serve the call.

    Example:
        >>> rms_norm(torch.tensor([3.0, 4.0, 0.0, 0.0]), torch.ones(4), group_size=2)
        tensor([0.8485, 1.1314, 0.0000, 0.0000])
    """
    size = _check("rms_norm", {"x": x}, {}, {"weight": weight}, eps, group_size)
    kernel = select_impl("rms_norm", impl, RMS_NORM, (x, weight))
    if kernel == "reference":
        return rms_norm_reference(x, weight, eps=eps, group_size=size)
    return norm(x, weight, eps, size, kernel)


def gated_rms_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool,
    impl: str = "auto",
) -> Tensor:
    """Normalise `x` and gate it with `silu(z)`, in one of the two orders.

        y = norm(x) * silu(z)        norm_before_gate=True
        y = norm(x * silu(z))        norm_before_gate=False (Mamba-2)

    Args:
        x: any number of leading axes; statistics are float32 for half types.
        z: the gate before its activation; shape and dtype of `x`.
        weight: one number per entry of the last axis; any floating dtype.
        eps: inside the root; positive.
        group_size: width of a group; must divide the last axis; None means one group.
        norm_before_gate: the order.
        impl: "auto", "portable", "native" or "reference".

    Returns:
        A tensor like `x`.

    Raises:
        ShapeError: `z` or `weight` do not fit `x`.
        ConfigError: `eps` is not positive, or `group_size` does not divide the last axis.
        DtypeError: dtypes disagree or are not floating point.
        BackendError: `impl` cannot serve the call.

    Example:
        >>> x, z = torch.tensor([3.0, 4.0]), torch.zeros(2)
        >>> gated_rms_norm(x, z, torch.ones(2), norm_before_gate=True)
        tensor([0., 0.])
    """
    where = "gated_rms_norm"
    size = _check(where, {"x": x, "z": z}, {}, {"weight": weight}, eps, group_size)
    kernel = select_impl(where, impl, GATED_RMS_NORM, (x, z, weight))
    if kernel == "reference":
        return gated_rms_norm_reference(
            x, z, weight, eps=eps, group_size=size, norm_before_gate=norm_before_gate
        )
    return gated_norm(x, z, weight, eps, size, norm_before_gate, kernel)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    residual_in_fp32: bool = False,
    impl: str = "auto",
) -> AddNorm:
    """Add a branch to the residual stream and normalise the sum by its root mean square.

        residual_out = x + residual        y = rms_norm(residual_out)

    Sum and norm are float32 for half types: `y` sees the sum before it is rounded for storage.

    Args:
        x: the branch; any number of leading axes.
        residual: the stream; shape of `x`, its dtype or float32; None means `x` opens the stream.
        weight: one number per entry of the last axis; any floating dtype.
        eps: inside the root; positive.
        residual_in_fp32: keep the stream in float32 beside half types. A stream that comes in
            float32 stays float32 either way.
        impl: "auto", "portable", "native" or "reference".

    Returns:
        `y` in the dtype of `x`, and the stream.

    Raises:
        ShapeError: `residual` or `weight` do not fit `x`.
        ConfigError: `eps` is not positive.
        DtypeError: dtypes disagree or are not floating point.
        BackendError: `impl` cannot serve the call.

    Example:
        >>> add_rms_norm(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]), torch.ones(2))
        AddNorm(y=tensor([0.8485, 1.1314]), residual=tensor([3., 4.]))
    """
    _check("add_rms_norm", {"x": x}, {"residual": residual}, {"weight": weight}, eps, None)
    kernel = select_impl("add_rms_norm", impl, RMS_NORM, (x, weight))
    if kernel == "reference":
        total, stored = add(x, residual, residual_in_fp32)
        return AddNorm(rms_norm_reference(total, weight, eps=eps).to(x.dtype), stored)
    return AddNorm(*add_norm(x, residual, weight, eps, residual_in_fp32, kernel))


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float = 1e-5,
    residual_in_fp32: bool = False,
) -> AddNorm:
    """Add a branch to the residual stream and apply layer normalisation to the sum.

        residual_out = x + residual
        y = (residual_out - mean) / sqrt(variance + eps) * weight + bias

    Sum and norm are float32 for half types: `y` sees the sum before it is rounded for storage.

    Args:
        x: the branch; any number of leading axes.
        residual: the stream; shape of `x`, its dtype or float32; None means `x` opens the stream.
        weight: one number per entry of the last axis; any floating dtype.
        bias: like `weight`; None means zero.
        eps: inside the root; positive.
        residual_in_fp32: keep the stream in float32 beside half types. A stream that comes in
            float32 stays float32 either way.

    Returns:
        `y` in the dtype of `x`, and the stream.

    Raises:
        ShapeError: `residual`, `weight` or `bias` do not fit `x`.
        ConfigError: `eps` is not positive.
        DtypeError: dtypes disagree or are not floating point.

    Example:
        >>> add_layer_norm(torch.tensor([1.0, 3.0]), None, torch.ones(2), None)
        AddNorm(y=tensor([-1.0000,  1.0000]), residual=tensor([1., 3.]))
    """
    scales = {"weight": weight, "bias": bias}
    size = _check("add_layer_norm", {"x": x}, {"residual": residual}, scales, eps, None)
    total, stored = add(x, residual, residual_in_fp32)
    bias = None if bias is None else bias.to(total.dtype)
    y = F.layer_norm(total, (size,), weight.to(total.dtype), bias, eps)
    return AddNorm(y.to(x.dtype), stored)


def _check(
    where: str,
    activations: dict[str, Tensor | None],
    accumulators: dict[str, Tensor | None],
    scales: dict[str, Tensor | None],
    eps: float,
    group_size: int | None,
) -> int:
    """Check every argument of a norm against the first; return the width of a group."""
    for name, tensor in (activations | accumulators | scales).items():
        absent = tensor is None and name in ("residual", "bias")
        if not absent and not isinstance(tensor, Tensor):
            raise DtypeError(f"{where}: {name} must be a tensor; got {type(tensor).__name__}.")
    x = activations["x"]
    assert x is not None
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ShapeError(
            f"{where}: x must have a last axis to normalise; got shape {tuple(x.shape)}."
        )
    compute = check_floats(where, activations, accumulators)
    for name, tensor in (activations | accumulators).items():
        if tensor is not None and tensor.shape != x.shape:
            raise ShapeError(
                f"{where}: {name} must have the shape of x {tuple(x.shape)}; "
                f"got {tuple(tensor.shape)}. Both must come from the same tokens."
            )
    for name, tensor in scales.items():
        if tensor is not None:
            _check_scale(where, name, tensor, x)
    # Below the smallest normal number the root of an all-zero slice would not be safe to divide by.
    if not eps >= torch.finfo(compute).tiny:
        raise ConfigError(
            f"{where}: eps must be positive and not vanish in {compute}; got {eps}. "
            f"The official value is 1e-5."
        )
    size = x.shape[-1] if group_size is None else group_size
    if size < 1 or x.shape[-1] % size:
        raise ConfigError(
            f"{where}: group_size must divide the last axis of x; "
            f"got group_size={group_size} for shape {tuple(x.shape)}."
        )
    guard(where, **activations, **accumulators, **scales)
    return size


def _check_scale(where: str, name: str, tensor: Tensor, x: Tensor) -> None:
    if not tensor.is_floating_point():
        raise DtypeError(f"{where}: {name} must be floating point; got {tensor.dtype}.")
    check_device(where, name, tensor, "x", x)
    if tensor.shape != x.shape[-1:]:
        raise ShapeError(
            f"{where}: {name} must have one entry per entry of the last axis of x "
            f"{tuple(x.shape)}; got shape {tuple(tensor.shape)}."
        )
