"""The door to the tail of a block: checks, shapes and the choice of who computes.

The arithmetic is in `portable.py` and the CPU kernel, the mathematics in `README.md`.
"""

import torch
from torch import Tensor

from anymamba.errors import ConfigError, ShapeError
from anymamba.ops.checks import check_floats, check_one_precision, guard
from anymamba.ops.select import select_impl
from anymamba.ops.tail import portable
from anymamba.ops.tail.reference import gated_product_reference, gated_tail_reference
from anymamba.ops.tail.schema import GATED_PRODUCT, GATED_TAIL

__all__ = ["gated_product", "gated_tail"]


def gated_tail(
    y_mhp: Tensor,
    x_mhp: Tensor,
    z_hp: Tensor,
    skip: Tensor,
    *,
    weight_i: Tensor | None = None,
    spread_mhp: Tensor | None = None,
    merge_mhp: Tensor | None = None,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Finish a block: add the skip, gate, perhaps normalise, and add up the ranks.

        t = y + skip x        g = silu(spread z)
        out = sum over m of merge * (t g | norm(t) g | norm(t g))

    Args:
        y_mhp: outputs of a scan; any leading axes.
        x_mhp: its inputs; shape and dtype of y.
        z_hp: the gate before its activation; dtype of y, without the axis of ranks.
        skip: weight of the direct path; (h,) or (h, p).
        weight_i: weight of the norm, one number per channel; None means no norm.
        spread_mhp: what the gate is multiplied with, by rank; needed if there are several.
        merge_mhp: what a rank is multiplied with before the sum; given together with `spread_mhp`.
        eps: inside the norm's root; positive.
        group_size: width of a group of the norm; must divide h * p; None means one group.
        norm_before_gate: the order of norm and gate.
        impl: "auto", "portable", "native" or "reference".

    Returns:
        The finished channels (..., h * p), in the dtype of y.

    Raises:
        ShapeError: shapes disagree, or ranks come without their weights.
        DtypeError: dtypes disagree or are not floating point.
        ConfigError: `eps` is not positive, or `group_size` does not divide the channels.
        BackendError: `impl` cannot serve the call.

    Example:
        >>> one = torch.ones(1, 1, 2)
        >>> gated_tail(one, one, 100 * one[0], torch.tensor([2.0]))
        tensor([300., 300.])
    """
    where = "gated_tail"
    if y_mhp.dim() < 3:
        raise ShapeError(
            f"{where}: y must have the axes (..., rank, heads, headdim); got {tuple(y_mhp.shape)}."
        )
    lead, (ranks, heads, width) = y_mhp.shape[:-3], y_mhp.shape[-3:]
    _check_shapes(where, y_mhp, x_mhp, z_hp, skip, weight_i, spread_mhp, merge_mhp)
    check_floats(where, {"y": y_mhp, "x": x_mhp, "z": z_hp})
    parameters = {"skip": skip, "weight": weight_i, "spread": spread_mhp, "merge": merge_mhp}
    check_one_precision(where, y=y_mhp, **parameters)
    channels = heads * width
    size = channels if group_size is None else group_size
    _check_norm(where, eps, size, channels)
    guard(where, y=y_mhp, x=x_mhp, z=z_hp, **parameters)
    skip_hp = skip if skip.dim() == 2 else skip.unsqueeze(-1).expand(heads, width)
    none, rows = skip.new_ones(1), lead.numel()
    tensors = (
        y_mhp.flatten(-2).reshape(rows, ranks, channels),
        x_mhp.flatten(-2).reshape(rows, ranks, channels),
        z_hp.flatten(-2).reshape(rows, channels),
        skip_hp.reshape(channels),
        none if weight_i is None else weight_i,
        none[None] if spread_mhp is None else spread_mhp.flatten(-2),
        none[None] if merge_mhp is None else merge_mhp.flatten(-2),
    )
    kernel = select_impl(where, impl, GATED_TAIL, tensors)
    if kernel == "reference":
        out_sv = gated_tail_reference(
            *tensors[:4],
            weight_i,
            None if spread_mhp is None else tensors[5],
            None if merge_mhp is None else tensors[6],
            eps,
            size,
            norm_before_gate,
        )
    else:
        order = "none" if weight_i is None else "before" if norm_before_gate else "after"
        constants = (eps, size, order, spread_mhp is not None)
        if kernel == "portable":
            (out_sv,) = portable.tail(*tensors, *constants)
        else:
            (out_sv,) = GATED_TAIL(*tensors, *constants, kernel=kernel)
    return out_sv.view(*lead, channels)


def gated_product(value: Tensor, gate: Tensor, *, impl: str = "auto") -> Tensor:
    """Multiply values with an activated gate, as the MLP of official models does.

        out = value * silu(gate)

    Args:
        value: any shape with a last axis.
        gate: shape and dtype of `value`; both may be slices of one projection.
        impl: "auto", "portable", "native" or "reference".

    Returns:
        A tensor like `value`.

    Raises:
        ShapeError: the shapes differ.
        DtypeError: dtypes disagree or are not floating point.
        BackendError: `impl` cannot serve the call.

    Example:
        >>> gated_product(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 100.0]))
        tensor([  0., 300.])
    """
    where = "gated_product"
    check_floats(where, {"value": value, "gate": gate})
    if value.dim() == 0 or value.shape != gate.shape:
        raise ShapeError(
            f"{where}: value and gate must have one shape with a last axis; "
            f"got {tuple(value.shape)} and {tuple(gate.shape)}."
        )
    guard(where, value=value, gate=gate)
    kernel = select_impl(where, impl, GATED_PRODUCT, (value, gate))
    if kernel == "reference":
        return gated_product_reference(value, gate)
    if kernel == "portable":
        return portable.product(value, gate)[0]
    # Counted, not -1: torch cannot infer the number of rows where a row has no elements.
    by_rows = (value.shape[:-1].numel(), value.shape[-1])
    pair = (value.reshape(by_rows), gate.reshape(by_rows))
    return GATED_PRODUCT(*pair, kernel=kernel)[0].view(value.shape)


def _check_shapes(
    where: str,
    y_mhp: Tensor,
    x_mhp: Tensor,
    z_hp: Tensor,
    skip: Tensor,
    weight_i: Tensor | None,
    spread_mhp: Tensor | None,
    merge_mhp: Tensor | None,
) -> None:
    lead, (ranks, heads, width) = y_mhp.shape[:-3], y_mhp.shape[-3:]
    wanted = {
        "x": (x_mhp, [(*lead, ranks, heads, width)]),
        "z": (z_hp, [(*lead, heads, width)]),
        "skip": (skip, [(heads,), (heads, width)]),
        "weight": (weight_i, [(heads * width,)]),
        "spread": (spread_mhp, [(ranks, heads, width)]),
        "merge": (merge_mhp, [(ranks, heads, width)]),
    }
    for name, (tensor, shapes) in wanted.items():
        if tensor is not None and tuple(tensor.shape) not in shapes:
            allowed = " or ".join(map(str, shapes))
            raise ShapeError(
                f"{where}: {name} must have shape {allowed} beside y of {tuple(y_mhp.shape)}; "
                f"got {tuple(tensor.shape)}."
            )
    if (spread_mhp is None) != (merge_mhp is None) or (spread_mhp is None and ranks != 1):
        raise ShapeError(
            f"{where}: spread and merge must come together, and must be there for several ranks; "
            f"got {ranks} ranks, spread {_shape(spread_mhp)}, merge {_shape(merge_mhp)}."
        )


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(tuple(tensor.shape))


def _check_norm(where: str, eps: float, size: int, channels: int) -> None:
    if not eps >= torch.finfo(torch.float32).tiny:
        raise ConfigError(
            f"{where}: eps must be positive and not vanish in float32; got {eps}. "
            "The official value is 1e-5."
        )
    if size < 1 or channels % size:
        raise ConfigError(f"{where}: group_size must divide the {channels} channels; got {size}.")
