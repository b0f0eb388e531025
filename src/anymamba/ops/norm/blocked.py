"""The root-mean-square norms in blocks of rows, with a backward that keeps the inputs only.

A block is short enough for the cache, so statistics, scaling and gate touch main memory once
(README 3 and 4). Small calls and compiled graphs take the plain formulas instead.
Rows are all leading axes flattened (s), the last axis is cut into groups (g) of equal width (d).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.ops.boundary import Operator
from anymamba.ops.native import Kernel
from anymamba.ops.norm import gated_native, native
from anymamba.ops.numerics import accumulate_dtype

__all__ = ["GATED_RMS_NORM", "RMS_NORM", "gated_norm", "norm", "plain_norm"]

# 1 MiB of float32: the fastest block on CPU (README 6).
BLOCK_ELEMENTS = 262_144


def norm(x: Tensor, weight: Tensor, eps: float, group_size: int, kernel: str) -> Tensor:
    """Normalise groups of the last axis of `x` by their root mean square."""
    if _is_plain(x, kernel):
        return plain_norm(x, weight, eps, group_size)[0]
    rows = RMS_NORM(x.reshape(-1, x.shape[-1]), weight, eps, group_size, kernel=kernel)[0]
    return rows.view(x.shape)


def gated_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int, before: bool, kernel: str
) -> Tensor:
    """Normalise and gate: `norm(x) * silu(z)` if `before`, else `norm(x * silu(z))`."""
    if _is_plain(x, kernel):
        return _plain_gated(x, z, weight, eps, group_size, before)[0]
    flat = (x.reshape(-1, x.shape[-1]), z.reshape(-1, z.shape[-1]))
    return GATED_RMS_NORM(*flat, weight, eps, group_size, before, kernel=kernel)[0].view(x.shape)


def _is_plain(x: Tensor, kernel: str) -> bool:
    # The compiler fuses the plain formula by itself; a small call is faster without a Function.
    small = torch.compiler.is_compiling() or x.numel() <= BLOCK_ELEMENTS
    return kernel == "portable" and small


def plain_norm(x: Tensor, weight: Tensor, eps: float, group_size: int) -> tuple[Tensor]:
    """Return the formula of `norm`, from differentiable functions."""
    return (_formula(x.to(accumulate_dtype(x.dtype)), weight, eps, group_size).to(x.dtype),)


def _plain_gated(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int, before: bool
) -> tuple[Tensor]:
    compute = accumulate_dtype(x.dtype)
    gate = F.silu(z.to(compute))
    if before:
        return ((_formula(x.to(compute), weight, eps, group_size) * gate).to(x.dtype),)
    return (_formula(x.to(compute) * gate, weight, eps, group_size).to(x.dtype),)


def _formula(x: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor:
    groups = x.unflatten(-1, (-1, group_size))
    # Not rsqrt: its derivative is the cube of the result, which vanishes at 1e18 in float32.
    root = torch.sqrt(groups.square().mean(dim=-1, keepdim=True) + eps)
    return (groups / root).flatten(-2) * weight.to(x.dtype)


def _norm_forward(x_sv: Tensor, weight_v: Tensor, eps: float, group_size: int) -> tuple[Tensor]:
    compute = accumulate_dtype(x_sv.dtype)
    weight_gd = weight_v.to(compute).reshape(-1, group_size)
    y_sv = x_sv.new_empty(x_sv.shape)
    for rows in _blocks(x_sv):
        x_sgd = _block(x_sv, rows, group_size, compute)
        y_sgd = (x_sgd * _scale(x_sgd, eps)).mul_(weight_gd)
        y_sv[rows] = y_sgd.flatten(1)
    return (y_sv,)


def _norm_backward(
    grad_y_sv: Tensor, x_sv: Tensor, weight_v: Tensor, eps: float, group_size: int
) -> tuple[Tensor, ...]:
    compute = accumulate_dtype(x_sv.dtype)
    weight_gd = weight_v.to(compute).reshape(-1, group_size)
    grad_weight_gd = torch.zeros_like(weight_gd)
    grad_x_sv = x_sv.new_empty(x_sv.shape)
    for rows in _blocks(x_sv):
        x_sgd = _block(x_sv, rows, group_size, compute)
        scale_sg1 = _scale(x_sgd, eps)
        grad_y_sgd = _block(grad_y_sv, rows, group_size, compute)
        grad_x_sgd = _pull(grad_y_sgd, x_sgd * scale_sg1, scale_sg1, weight_gd, grad_weight_gd)
        grad_x_sv[rows] = grad_x_sgd.flatten(1)
    return grad_x_sv, grad_weight_gd.flatten().to(weight_v.dtype)


def _gated_forward(
    x_sv: Tensor, z_sv: Tensor, weight_v: Tensor, eps: float, group_size: int, before: bool
) -> tuple[Tensor]:
    compute = accumulate_dtype(x_sv.dtype)
    weight_gd = weight_v.to(compute).reshape(-1, group_size)
    y_sv = x_sv.new_empty(x_sv.shape)
    for rows in _blocks(x_sv):
        x_sgd = _block(x_sv, rows, group_size, compute)
        gate_sgd = F.silu(_block(z_sv, rows, group_size, compute))
        if before:
            y_sgd = gate_sgd.mul_(x_sgd).mul_(_scale(x_sgd, eps))
        else:
            y_sgd = gate_sgd.mul_(x_sgd)
            y_sgd.mul_(_scale(y_sgd, eps))
        y_sv[rows] = y_sgd.mul_(weight_gd).flatten(1)
    return (y_sv,)


def _gated_backward(
    grad_y_sv: Tensor,
    x_sv: Tensor,
    z_sv: Tensor,
    weight_v: Tensor,
    eps: float,
    group_size: int,
    before: bool,
) -> tuple[Tensor, ...]:
    compute = accumulate_dtype(x_sv.dtype)
    weight_gd = weight_v.to(compute).reshape(-1, group_size)
    grad_weight_gd = torch.zeros_like(weight_gd)
    grad_x_sv = x_sv.new_empty(x_sv.shape)
    grad_z_sv = z_sv.new_empty(z_sv.shape)
    for rows in _blocks(x_sv):
        x_sgd = _block(x_sv, rows, group_size, compute)
        z_sgd = _block(z_sv, rows, group_size, compute)
        grad_y_sgd = _block(grad_y_sv, rows, group_size, compute)
        gate_sgd = F.silu(z_sgd)
        if before:
            scale_sg1 = _scale(x_sgd, eps)
            unit_sgd = x_sgd * scale_sg1
            grad_gate_sgd = (grad_y_sgd * unit_sgd).mul_(weight_gd)
            grad_x_sgd = _pull(
                gate_sgd.mul_(grad_y_sgd), unit_sgd, scale_sg1, weight_gd, grad_weight_gd
            )
        else:
            inner_sgd = x_sgd * gate_sgd
            scale_sg1 = _scale(inner_sgd, eps)
            grad_inner_sgd = _pull(
                grad_y_sgd, inner_sgd.mul_(scale_sg1), scale_sg1, weight_gd, grad_weight_gd
            )
            grad_x_sgd = gate_sgd.mul_(grad_inner_sgd)
            grad_gate_sgd = grad_inner_sgd.mul_(x_sgd)
        grad_x_sv[rows] = grad_x_sgd.flatten(1)
        grad_z_sv[rows] = torch.ops.aten.silu_backward(grad_gate_sgd, z_sgd).flatten(1)
    return grad_x_sv, grad_z_sv, grad_weight_gd.flatten().to(weight_v.dtype)


def _scale(x_sgd: Tensor, eps: float) -> Tensor:
    """Return `1 / sqrt(mean(x^2) + eps)` of each group, with an axis of size 1 kept."""
    norm_sg1 = torch.linalg.vector_norm(x_sgd, dim=-1, keepdim=True)
    return norm_sg1.square_().div_(x_sgd.shape[-1]).add_(eps).rsqrt_()


def _pull(
    grad_y_sgd: Tensor,
    unit_sgd: Tensor,
    scale_sg1: Tensor,
    weight_gd: Tensor,
    grad_weight_gd: Tensor,
) -> Tensor:
    """Return the gradient of x from that of `y = unit * weight`; add to the weight's (README 4)."""
    product_sgd = grad_y_sgd * unit_sgd
    grad_weight_gd += product_sgd.sum(dim=0)
    mean_sg1 = product_sgd.mul_(weight_gd).mean(dim=-1, keepdim=True)
    grad_unit_sgd = grad_y_sgd * weight_gd
    return grad_unit_sgd.addcmul_(unit_sgd, mean_sg1, value=-1).mul_(scale_sg1)


def _blocks(x_sv: Tensor) -> Iterator[slice]:
    """Cut the rows; devices with large parallelism and no cache to fill take them whole."""
    count, width = x_sv.shape
    rows = max(1, BLOCK_ELEMENTS // width) if x_sv.device.type == "cpu" else max(1, count)
    return (slice(start, start + rows) for start in range(0, count, rows))


def _block(x_sv: Tensor, rows: slice, group_size: int, compute: torch.dtype) -> Tensor:
    return x_sv[rows].to(compute).unflatten(1, (-1, group_size))


def _fake(x_sv: Tensor, *_: object) -> tuple[Tensor]:
    return (x_sv.new_empty(x_sv.shape),)


# A mapped axis (even of the weights) becomes more groups of the same width.
RMS_NORM = Operator(
    "rms_norm",
    tensors=("x", "weight"),
    constants="float eps, int group_size",
    outputs=1,
    forward=_norm_forward,
    backward=_norm_backward,
    fake=_fake,
    composite=plain_norm,
    merge_axes=lambda *_: ((1, 0), (1,)),
    merge_constants=lambda _size, _tensors, constants: constants,
    native=Kernel(native.refusal, native.forward, native.backward),
)
GATED_RMS_NORM = Operator(
    "gated_rms_norm",
    tensors=("x", "z", "weight"),
    constants="float eps, int group_size, bool before",
    outputs=1,
    forward=_gated_forward,
    backward=_gated_backward,
    fake=_fake,
    composite=_plain_gated,
    merge_axes=lambda *_: ((1, 1, 0), (1,)),
    merge_constants=lambda _size, _tensors, constants: constants,
    native=Kernel(gated_native.refusal, gated_native.forward, gated_native.backward),
)
