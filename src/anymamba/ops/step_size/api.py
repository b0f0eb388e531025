"""The door to step sizes: checks, shapes and the choice of who computes.

The mathematics is in `README.md`.
"""

from torch import Tensor

from anymamba.errors import ShapeError
from anymamba.ops.checks import check_floats, check_one_precision, guard
from anymamba.ops.select import select_impl
from anymamba.ops.step_size import portable
from anymamba.ops.step_size.reference import step_size_reference
from anymamba.ops.step_size.schema import STEP_SIZE

__all__ = ["step_size"]


def step_size(x: Tensor, bias_v: Tensor, *, impl: str = "auto") -> Tensor:
    """Return step sizes: positive numbers from projected ones.

        dt = softplus(x + bias)

    Args:
        x: projected numbers; any leading axes.
        bias_v: one number per entry of the last axis.
        impl: "auto", "portable", "native" or "reference".

    Returns:
        A tensor of the shape of `x`; float32 beside half types.

    Raises:
        ShapeError: `bias_v` does not fit the last axis.
        DtypeError: dtypes disagree or are not floating point.
        BackendError: `impl` cannot serve the call.

    Example:
        >>> import torch
        >>> step_size(torch.zeros(1, 2), torch.tensor([0.0, 30.0]))
        tensor([[ 0.6931, 30.0000]])
    """
    where = "step_size"
    check_floats(where, {"x": x})
    if x.dim() == 0 or bias_v.shape != x.shape[-1:]:
        raise ShapeError(
            f"{where}: bias must have one number per entry of the last axis of x; "
            f"got {tuple(bias_v.shape)} beside x of {tuple(x.shape)}."
        )
    check_one_precision(where, x=x, bias_v=bias_v)
    guard(where, x=x, bias_v=bias_v)
    kernel = select_impl(where, impl, STEP_SIZE, (x, bias_v))
    if kernel == "reference":
        return step_size_reference(x, bias_v)
    if kernel == "portable":
        return portable.forward(x, bias_v)[0]
    # Counted, not -1: torch cannot infer the number of rows where a row has no elements.
    x_sv = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return STEP_SIZE(x_sv, bias_v, kernel=kernel)[0].view(x.shape)
