"""The door to the causal convolution: checks, windows, packed sequences.

The arithmetic is in `blocked.py`, the mathematics in `README.md`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.errors import ConfigError, ShapeError
from anymamba.notation import bind_dims
from anymamba.ops.checks import check_floats, guard
from anymamba.ops.conv.blocked import convolve
from anymamba.ops.numerics import accumulate_dtype
from anymamba.ops.packing import packing

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
        cu_seqlens: q + 1 borders of sequences that lie end to end in one row; then b is 1 and
            the windows have one row per sequence; an empty sequence keeps its window.

    Returns:
        The outputs, and the last k columns of [window | x].

    Raises:
        ShapeError: sizes disagree.
        DtypeError: dtypes disagree or are not floating point.
        ConfigError: the activation is unknown.
        PackingError: `cu_seqlens` do not describe the row.

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
    if cu_seqlens is not None:
        return _packed(where, x_bsv, weight_vk, bias_v, window_bvk, silu, cu_seqlens)
    if window_bvk is None:
        window_bvk = x_bsv.new_zeros(dims["b"], dims["v"], dims["k"])
    _check_rows(where, window_bvk, dims["b"], "batch")
    return ConvOutput(*convolve(x_bsv, window_bvk, weight_vk, bias_v, None, silu))


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


def _check_rows(where: str, window_bvk: Tensor, rows: int, what: str) -> None:
    if window_bvk.shape[0] != rows:
        raise ShapeError(
            f"{where}: window_bvk must have one row per {what} ({rows}); "
            f"got shape {tuple(window_bvk.shape)}. Pass the window this {what} ended with."
        )


class ExtendedRow(NamedTuple):
    """Tokens in one row with the windows they follow, so that a plain filter serves all.

    The filter's output at slot `token_s[t]` belongs to token t; windows need no output.
    """

    row_bSv: Tensor
    token_s: Tensor
    window_bvk: Tensor  # the last k columns of each row or sequence


def extend_row(
    x_bsv: Tensor, window_bvk: Tensor, *, cu_seqlens: Tensor | None = None
) -> ExtendedRow:
    """Put windows in front of the tokens they precede: of each row, or of each packed sequence.

    The row has the wider dtype of the two, so that nothing is lost.

    Args:
        x_bsv: tokens, channels last.
        window_bvk: the k columns before each row; one per sequence when packed.
        cu_seqlens: borders of packed sequences; batch must be 1.

    Example:
        >>> x_bsv, window_bvk = torch.ones(1, 3, 1), torch.zeros(2, 1, 2)
        >>> extend_row(x_bsv, window_bvk, cu_seqlens=torch.tensor([0, 1, 3])).token_s
        tensor([2, 5, 6])
    """
    where = "extend_row"
    batch, length, channels = x_bsv.shape
    width = window_bvk.shape[2]
    if cu_seqlens is None:
        _check_rows(where, window_bvk, batch, "batch")
        row_bSv = torch.cat([window_bvk.transpose(1, 2), x_bsv], 1)
        token_s = torch.arange(width, width + length, device=x_bsv.device)
        return ExtendedRow(row_bSv, token_s, _slide(window_bvk, x_bsv))
    pack = packing(where, cu_seqlens, batch, length, x_bsv.device)
    _check_rows(where, window_bvk, pack.count, "sequence")
    token_s = torch.arange(length, device=x_bsv.device) + (pack.sequence_s + 1) * width
    column_qk = torch.arange(pack.count * width, device=x_bsv.device).view(pack.count, width)
    opening = (pack.cu_seqlens[:-1, None] + column_qk).flatten()
    closing = (pack.cu_seqlens[1:, None] + column_qk).flatten()
    rows_Sv = torch.cat([x_bsv[0], window_bvk.transpose(1, 2).flatten(0, 1)])
    row_Sv = torch.zeros_like(rows_Sv).index_copy(0, torch.cat([token_s, opening]), rows_Sv)
    last_qkv = row_Sv.index_select(0, closing).view(pack.count, width, channels)
    last_qvk = last_qkv.transpose(1, 2).to(window_bvk.dtype).contiguous()
    return ExtendedRow(row_Sv[None], token_s, last_qvk)


def _slide(window_bvk: Tensor, x_bsv: Tensor) -> Tensor:
    """Return the last k columns of [window | x]."""
    width = window_bvk.shape[2]
    newest_bvs = x_bsv[:, -width:].transpose(1, 2).to(window_bvk.dtype)
    return torch.cat([window_bvk, newest_bvs], 2)[:, :, -width:].contiguous()


def _packed(
    where: str,
    x_bsv: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor,
    window_qvk: Tensor | None,
    silu: bool,
    cu_seqlens: Tensor,
) -> ConvOutput:
    """Convolve one longer row in which each sequence is preceded by its window (README 3)."""
    batch, length, channels = x_bsv.shape
    width = weight_vk.shape[1]
    pack = packing(where, cu_seqlens, batch, length, x_bsv.device)
    if window_qvk is None:
        window_qvk = x_bsv.new_zeros(pack.count, channels, width)
    _check_rows(where, window_qvk, pack.count, "sequence")
    row_1Sv, token_s, last_qvk = extend_row(x_bsv, window_qvk, cu_seqlens=cu_seqlens)
    kept_S = torch.zeros(row_1Sv.shape[1], dtype=torch.bool, device=x_bsv.device)
    kept_S = kept_S.index_fill(0, token_s, True)
    # The slots of the windows see two sequences at once: nobody reads them, but without `kept` a
    # NaN there would reach the neighbour through the activation's derivative.
    none_1vk = row_1Sv.new_zeros(1, channels, width)
    y_1Sv, _ = convolve(row_1Sv, none_1vk, weight_vk, bias_v, kept_S, silu)
    return ConvOutput(y_1Sv.index_select(1, token_s).to(x_bsv.dtype), last_qvk)
