"""The convolution as its definition says: one token at a time. Judges the fast form; slow."""

import torch
from torch import Tensor

from anymamba.ops.numerics import accumulate_dtype

__all__ = ["causal_conv1d_reference"]


def causal_conv1d_reference(
    x_bsv: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor | None,
    window_bvk: Tensor | None,
    *,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Slide a window of k columns over the tokens and weigh it.

        window[t] = [window[t-1] without its oldest column | x[t]]
        y[t]      = act(bias + sum_j weight[j] * window[t][j])

    Returns:
        The outputs (b, s, v) and the last window (b, v, k).
    """
    compute = accumulate_dtype(x_bsv.dtype)
    batch, length, channels = x_bsv.shape
    window = window_bvk
    if window is None:
        window = x_bsv.new_zeros(batch, channels, weight_vk.shape[1])
    outputs = []
    for t in range(length):
        window = torch.cat([window[:, :, 1:], x_bsv[:, t, :, None].to(window.dtype)], dim=2)
        y_bv = (window.to(compute) * weight_vk.to(compute)).sum(dim=2)
        if bias_v is not None:
            y_bv = y_bv + bias_v.to(compute)
        if activation == "silu":
            y_bv = y_bv * torch.sigmoid(y_bv)
        outputs.append(y_bv.to(x_bsv.dtype))
    return torch.stack(outputs, dim=1), window
