"""The short convolution of a block: through its `nn.Conv1d`, or straight into `ops`."""

import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.nn.plain import is_plain
from anymamba.ops import ConvOutput, ConvStepOutput, causal_conv1d, causal_conv1d_step, extend_row

__all__ = ["convolve", "convolve_token", "short_convolution"]


def short_convolution(channels: int, width: int, bias: bool, **factory: object) -> nn.Conv1d:
    """Return the depthwise convolution that official checkpoints name `conv1d`."""
    return nn.Conv1d(
        channels,
        channels,
        width,
        groups=channels,
        padding=width - 1,
        bias=bias,
        **factory,  # pyright: ignore[reportArgumentType]
    )


def convolve(
    conv1d: nn.Module,
    x_bsv: Tensor,
    window_bvk: Tensor,
    cu_seqlens: Tensor | None,
    activation: str | None = "silu",
    *,
    impl: str = "auto",
) -> ConvOutput:
    """Convolve and activate a stretch of tokens, from a window to a window.

    A hooked or swapped module computes itself, whatever `impl` says.
    """
    if is_plain(conv1d, nn.Conv1d):
        weight_vk = conv1d.weight.squeeze(1)  # pyright: ignore[reportCallIssue]
        return causal_conv1d(
            x_bsv,
            weight_vk,
            conv1d.bias,  # pyright: ignore[reportArgumentType]
            window_bvk,
            activation=activation,
            impl=impl,
            cu_seqlens=cu_seqlens,
        )
    # Hooked or swapped: the module sees the tokens behind their windows.
    row_bSv, token_s, last_bvk = extend_row(x_bsv, window_bvk, cu_seqlens=cu_seqlens)
    y_bvS = conv1d(row_bSv.to(x_bsv.dtype).transpose(1, 2))
    y_bsv = y_bvS.transpose(1, 2).index_select(1, token_s)
    return ConvOutput(F.silu(y_bsv) if activation == "silu" else y_bsv, last_bvk)


def convolve_token(
    conv1d: nn.Module, x_bv: Tensor, window_bvk: Tensor, activation: str | None = "silu"
) -> ConvStepOutput:
    """Convolve and activate one token."""
    if is_plain(conv1d, nn.Conv1d):
        weight_vk = conv1d.weight.squeeze(1)  # pyright: ignore[reportCallIssue]
        return causal_conv1d_step(x_bv, weight_vk, conv1d.bias, window_bvk, activation=activation)  # pyright: ignore[reportArgumentType]
    y_bsv, window_bvk = convolve(conv1d, x_bv.unsqueeze(1), window_bvk, None, activation)
    return ConvStepOutput(y_bsv.squeeze(1), window_bvk)
