"""The convolution as an operator: `anymamba::causal_conv1d_fwd` and `_bwd`."""

import torch
from torch import Tensor

from anymamba.ops.boundary import Operator
from anymamba.ops.conv import native
from anymamba.ops.conv.blocked import is_small, row_backward, row_forward, row_plain
from anymamba.ops.conv.rows import extend_row, packed_slots
from anymamba.ops.native import Kernel
from anymamba.ops.numerics import accumulate_dtype
from anymamba.ops.packing import packing

__all__ = ["CAUSAL_CONV1D", "convolve"]


def convolve(
    x_bsv: Tensor,
    window_bvk: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor,
    cu_seqlens: Tensor | None,
    silu: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Convolve rows that follow windows; return the outputs and the last windows.

    Args:
        x_bsv: the tokens.
        window_bvk: the k columns before each row, or before each packed sequence; newest last.
        weight_vk: one filter per channel; its last column meets the newest token.
        bias_v: added before the activation.
        cu_seqlens: borders of packed sequences, or None.
        silu: whether SiLU follows.
        kernel: who computes, as `select_impl` returned it.
    """
    arguments = (x_bsv, window_bvk, weight_vk, bias_v, cu_seqlens, silu)
    if kernel == "portable" and is_small(x_bsv):
        return _plain(*arguments)
    y_bsv, last_bvk = CAUSAL_CONV1D(*arguments, kernel=kernel)
    return y_bsv, last_bvk


def _plain(x, window, weight, bias, cu_seqlens, silu):
    return _by_rows(row_plain, x, window, weight, bias, cu_seqlens, silu)


def _forward(x, window, weight, bias, cu_seqlens, silu):
    return _by_rows(row_forward, x, window, weight, bias, cu_seqlens, silu)


def _by_rows(run, x_bsv, window_bvk, weight_vk, bias_v, cu_seqlens, silu):
    """Run on the rows, or on one longer row in which windows precede their sequences (README 3)."""
    if cu_seqlens is None:
        return run(x_bsv, window_bvk, weight_vk, bias_v, None, silu)
    row_1Sv, token_s, last_qvk = extend_row(x_bsv, window_bvk, cu_seqlens=cu_seqlens)
    none_1vk = _no_window(row_1Sv, window_bvk)
    y_1Sv, _ = run(row_1Sv, none_1vk, weight_vk, bias_v, _kept(row_1Sv, token_s), silu)
    return y_1Sv.index_select(1, token_s).to(x_bsv.dtype), last_qvk


def _backward(grad_y, grad_last, x, window, weight, bias, cu_seqlens, silu):
    if cu_seqlens is None:
        return row_backward(grad_y, grad_last, x, window, weight, bias, None, silu)
    # In the wide dtype throughout, so that a token which is also in a last window is rounded once.
    compute = accumulate_dtype(x.dtype)
    pack = packing("causal_conv1d", cu_seqlens, 1, x.shape[1], x.device)
    token_s, opening_qk, closing_qk = packed_slots(pack, window.shape[2])
    row_1Sv = extend_row(x.to(compute), window.to(compute), cu_seqlens=cu_seqlens).row_bSv
    none_1vk = _no_window(row_1Sv, window)
    grad_row_1Sv = torch.zeros_like(row_1Sv).index_copy(1, token_s, grad_y.to(compute))
    grad_row_1Sv, _, grad_weight, grad_bias = row_backward(
        *(grad_row_1Sv, torch.zeros_like(none_1vk), row_1Sv, none_1vk),
        *(weight, bias, _kept(row_1Sv, token_s), silu),
    )
    grad_last_Kv = grad_last.to(compute).transpose(1, 2).flatten(0, 1)
    grad_row_Sv = grad_row_1Sv[0].index_add(0, closing_qk.flatten(), grad_last_Kv)
    grad_window_qkv = grad_row_Sv.index_select(0, opening_qk.flatten()).view(*opening_qk.shape, -1)
    return (
        grad_row_Sv.index_select(0, token_s)[None].to(x.dtype),
        grad_window_qkv.transpose(1, 2).to(window.dtype).contiguous(),
        grad_weight,
        grad_bias,
    )


def _no_window(row_1Sv: Tensor, window_bvk: Tensor) -> Tensor:
    return row_1Sv.new_zeros(1, *window_bvk.shape[1:])


def _kept(row_1Sv: Tensor, token_s: Tensor) -> Tensor:
    # The slots of the windows see two sequences at once: nobody reads them, but without this a NaN
    # there would reach the neighbour through the activation's derivative.
    kept_S = torch.zeros(row_1Sv.shape[1], dtype=torch.bool, device=row_1Sv.device)
    return kept_S.index_fill(0, token_s, True)


def _fake(x, window, *_):
    return x.new_empty(x.shape), window.new_empty(window.shape)


CAUSAL_CONV1D = Operator(
    "causal_conv1d",
    tensors=("x", "window", "weight", "bias"),
    constants="Tensor? cu_seqlens, bool silu",
    outputs=2,
    forward=_forward,
    backward=_backward,
    fake=_fake,
    composite=_plain,
    # Channels never meet, so a mapped axis (even of the weights) becomes more channels.
    merge_axes=lambda *_: ((2, 1, 0, 0), (2, 1)),
    merge_constants=lambda _size, _tensors, constants: constants,
    native=Kernel(native.refusal, native.forward, native.backward),
)
