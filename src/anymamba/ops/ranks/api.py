"""The door to the values of ranks: checks, shapes and the choice of who computes.

The mathematics is in `README.md`.
"""

from torch import Tensor

from anymamba.errors import ShapeError
from anymamba.ops.checks import check_floats, check_one_precision, guard
from anymamba.ops.ranks import portable
from anymamba.ops.ranks.reference import rank_values_reference
from anymamba.ops.ranks.schema import RANK_VALUES
from anymamba.ops.select import select_impl

__all__ = ["rank_values"]


def rank_values(x_hp: Tensor, weight_mhp: Tensor, *, impl: str = "auto") -> Tensor:
    """Return the values of each rank: one projected vector, weighted.

        y[m] = x * weight[m]

    Args:
        x_hp: projected values; any leading axes.
        weight_mhp: one weight per rank and channel.
        impl: "auto", "portable", "native" or "reference".

    Returns:
        The values (..., m, h, p), in the dtype of `x_hp`.

    Raises:
        ShapeError: the shapes disagree.
        DtypeError: dtypes disagree or are not floating point.
        BackendError: `impl` cannot serve the call.

    Example:
        >>> import torch
        >>> rank_values(torch.ones(1, 2), torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])).flatten()
        tensor([1., 2., 3., 4.])
    """
    where = "rank_values"
    check_floats(where, {"x": x_hp})
    fits = x_hp.dim() >= 2 and weight_mhp.dim() == 3 and weight_mhp.shape[1:] == x_hp.shape[-2:]
    if not fits or len(weight_mhp) == 0:
        raise ShapeError(
            f"{where}: x must have the axes (..., h, p) and weight (m, h, p) with at least one "
            f"rank m; got {tuple(x_hp.shape)} and {tuple(weight_mhp.shape)}."
        )
    check_one_precision(where, x=x_hp, weight=weight_mhp)
    guard(where, x=x_hp, weight=weight_mhp)
    lead = x_hp.shape[:-2]
    # Counted, not -1: torch cannot infer the number of rows where a row has no elements.
    x_sv = x_hp.flatten(-2).reshape(lead.numel(), x_hp.shape[-2:].numel())
    weight_mv = weight_mhp.flatten(-2)
    kernel = select_impl(where, impl, RANK_VALUES, (x_sv, weight_mv))
    if kernel == "reference":
        y_smv = rank_values_reference(x_sv, weight_mv)
    elif kernel == "portable":
        (y_smv,) = portable.forward(x_sv, weight_mv)
    else:
        (y_smv,) = RANK_VALUES(x_sv, weight_mv, kernel=kernel)
    return y_smv.view(*lead, *weight_mhp.shape)
