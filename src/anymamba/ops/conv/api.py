"""The door to the causal convolution: checks, windows, packed sequences.

The arithmetic is in `schema.py` and `blocked.py`, the mathematics in `README.md`.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.errors import BackendError, ConfigError
from anymamba.notation import bind_dims
from anymamba.ops.checks import check_floats, guard
from anymamba.ops.conv.reference import causal_conv1d_reference
from anymamba.ops.conv.rows import ExtendedRow, check_rows, extend_row
from anymamba.ops.conv.schema import CAUSAL_CONV1D, convolve
from anymamba.ops.numerics import accumulate_dtype
from anymamba.ops.packing import Packing, packing
from anymamba.ops.select import select_impl

__all__ = [
    "ConvOutput",
    "ConvStepOutput",
    "ExtendedRow",
    "causal_conv1d",
    "causal_conv1d_step",
    "extend_row",
]


class ConvOutput(NamedTuple):
    """Outputs of a sequence, in the dtype of x, and the window that continues it.

    The window holds the last k inputs, newest last, in the dtype of the given window, else of x.
    """

    y_bsv: Tensor
    window_bvk: Tensor


class ConvStepOutput(NamedTuple):
    """Output of one token and the window that continues it."""

    y_bv: Tensor
    window_bvk: Tensor


def causal_conv1d(
    x_bsv: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor | None = None,
    window_bvk: Tensor | None = None,
    *,
    activation: str | None = None,
    impl: str = "auto",
    cu_seqlens: Tensor | None = None,
) -> ConvOutput:
    """Filter each channel over the last k tokens, from a given window to a returned window.

        y[t] = act(bias + sum_j weight[j] * x[t - (k-1) + j])        x[t < 0] from the window

    Args:
        x_bsv: tokens, channels last; s >= 1.
        weight_vk: one filter per channel, the newest token's weight last; the dtype of x or, beside
            half types, float32.
        bias_v: added before the activation; zeros when omitted.
        window_bvk: the last k inputs before the first token, newest last (the oldest is never
            read); zeros when omitted; receives a gradient when given.
        activation: None or `"silu"`.
        impl: `auto` takes the compiled kernel where it can; `native` insists on it; `portable` is
            plain torch; `reference` is the loop over time.
        cu_seqlens: q + 1 borders of sequences that lie end to end in one row; then b is 1 and
            the windows have one row per sequence; an empty sequence keeps its window.

    Returns:
        The outputs, and the last k columns of [window | x].

    Raises:
        ShapeError: sizes disagree.
        DtypeError: dtypes disagree or are not floating point.
        ConfigError: the activation or `impl` is unknown.
        PackingError: `cu_seqlens` do not describe the row.
        BackendError: `impl` cannot serve the call.

    Example:
        >>> x_bsv = torch.tensor([[[1.0], [2.0], [3.0]]])
        >>> y, window_bvk = causal_conv1d(x_bsv, torch.tensor([[10.0, 1.0]]))
        >>> y.flatten().tolist(), window_bvk.flatten().tolist()
        ([1.0, 12.0, 23.0], [2.0, 3.0])
    """
    where = "causal_conv1d"
    dims = bind_dims(where, x_bsv=x_bsv, weight_vk=weight_vk, bias_v=bias_v)
    if window_bvk is not None:
        bind_dims(where, weight_vk=weight_vk, window_bvk=window_bvk)
    silu = _check(where, x_bsv, weight_vk, bias_v, window_bvk, activation)
    if bias_v is None:
        bias_v = weight_vk.new_zeros(dims["v"])
    pack = None
    if cu_seqlens is not None:
        pack = packing(where, cu_seqlens, dims["b"], dims["s"], x_bsv.device)
    rows, what = (dims["b"], "batch") if pack is None else (pack.count, "sequence")
    if window_bvk is None:
        window_bvk = x_bsv.new_zeros(rows, dims["v"], dims["k"])
    check_rows(where, window_bvk, rows, what)
    kernel = select_impl(where, impl, CAUSAL_CONV1D, (x_bsv, window_bvk, weight_vk, bias_v))
    if kernel == "reference":
        return _reference(where, x_bsv, weight_vk, bias_v, window_bvk, activation, pack)
    borders = None if pack is None else pack.cu_seqlens
    return ConvOutput(*convolve(x_bsv, window_bvk, weight_vk, bias_v, borders, silu, kernel))


def _reference(
    where: str,
    x_bsv: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor,
    window_bvk: Tensor,
    activation: str | None,
    pack: Packing | None,
) -> ConvOutput:
    """Run the loop over time, for packed sequences one by one."""
    if pack is None:
        run = causal_conv1d_reference(x_bsv, weight_vk, bias_v, window_bvk, activation=activation)
        return ConvOutput(*run)
    if pack.borders is None:
        raise BackendError(
            f"{where}: impl='reference' reads the borders of packed sequences, which a traced call "
            "does not have. Use impl='portable'."
        )
    outputs, windows = [], []
    for row, (start, stop) in enumerate(pairwise(pack.borders)):
        last_1vk = window_bvk[row : row + 1]
        if stop > start:
            y_1sv, last_1vk = causal_conv1d_reference(
                x_bsv[:, start:stop], weight_vk, bias_v, last_1vk, activation=activation
            )
            outputs.append(y_1sv)
        windows.append(last_1vk)
    return ConvOutput(torch.cat(outputs, 1), torch.cat(windows))


def causal_conv1d_step(
    x_bv: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor | None,
    window_bvk: Tensor,
    *,
    activation: str | None = None,
) -> ConvStepOutput:
    """Filter one more token; the unrolled steps equal `causal_conv1d`.

    Args:
        x_bv: the token.
        weight_vk: one filter per channel, the newest token's weight last.
        bias_v: added before the activation, or None.
        window_bvk: the last k inputs before this token, newest last; not changed in place.
        activation: None or `"silu"`.

    Returns:
        The output (b, v) and the new window.

    Raises:
        ShapeError: sizes disagree.
        DtypeError: dtypes disagree or are not floating point.
        ConfigError: the activation is unknown.

    Example:
        >>> window_bvk = torch.tensor([[[1.0, 2.0]]])
        >>> y, window_bvk = causal_conv1d_step(
        ...     torch.tensor([[3.0]]), torch.tensor([[10.0, 1.0]]), None, window_bvk
        ... )
        >>> y.tolist(), window_bvk.tolist()
        ([[23.0]], [[[2.0, 3.0]]])
    """
    where = "causal_conv1d_step"
    bind_dims(where, x_bv=x_bv, weight_vk=weight_vk, bias_v=bias_v, window_bvk=window_bvk)
    silu = _check(where, x_bv, weight_vk, bias_v, window_bvk, activation)
    compute = accumulate_dtype(x_bv.dtype)
    new_bvk = torch.cat([window_bvk[:, :, 1:], x_bv[:, :, None].to(window_bvk.dtype)], dim=2)
    y_bv = (new_bvk.to(compute) * weight_vk.to(compute)).sum(dim=2)
    if bias_v is not None:
        y_bv = y_bv + bias_v.to(compute)
    if silu:
        y_bv = F.silu(y_bv)
    return ConvStepOutput(y_bv.to(x_bv.dtype), new_bvk)


def _check(
    where: str,
    x: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor | None,
    window_bvk: Tensor | None,
    activation: str | None,
) -> bool:
    """Check dtypes and the activation's name; return whether it is SiLU."""
    if activation not in (None, "silu"):
        raise ConfigError(f"{where}: activation must be None or 'silu'; got {activation!r}.")
    check_floats(where, {"x": x}, {"weight": weight_vk, "bias": bias_v, "window": window_bvk})
    guard(where, x=x, weight=weight_vk, bias=bias_v, window=window_bvk)
    return activation == "silu"
