"""The convolution of rows in blocks of time, with a hand-written backward from the inputs alone.

A block is short enough for the cache, so the k multiply-adds and the activation touch main memory
once (README 3 and 4). Small calls take the plain formula instead.

The functions on rows take: `x_bsv`, the tokens; `window_bvk`, the k columns before the first token,
newest last; `weight_vk` and `bias_v`; `kept_s`, which outputs are wanted (the others become zero
and receive no gradient), or None for all; and whether SiLU follows.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.ops.numerics import accumulate_dtype

__all__ = ["is_small", "row_backward", "row_forward", "row_plain"]

# 1.5 MiB of float32: the fastest block on CPU (README 6).
BLOCK_ELEMENTS = 393_216
# A wide batch must not shrink blocks until the calls cost more than the arithmetic.
MIN_ROWS = 32


def is_small(x_bsv: Tensor) -> bool:
    """Return whether the plain formula is the faster one."""
    if torch.compiler.is_compiling():
        # README 6: the compiler's own CPU code for shifted sums is several times slower.
        return x_bsv.device.type != "cpu"
    return x_bsv.numel() <= BLOCK_ELEMENTS


def row_plain(
    x_bsv: Tensor,
    window_bvk: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor,
    kept_s: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    """Compute from differentiable functions, whole length at once."""
    compute = accumulate_dtype(x_bsv.dtype)
    width = weight_vk.shape[1]
    length = x_bsv.shape[1]
    ext_bSv = torch.cat([window_bvk.transpose(1, 2).to(compute), x_bsv.to(compute)], dim=1)
    weight_kv = weight_vk.to(compute).t()
    y_bsv = bias_v.to(compute)
    for j in range(width):
        y_bsv = torch.addcmul(y_bsv, ext_bSv[:, j + 1 : j + 1 + length], weight_kv[j])
    if kept_s is not None:
        y_bsv = y_bsv.masked_fill(~kept_s[:, None], 0)
    if silu:
        y_bsv = F.silu(y_bsv)
    last_bvk = ext_bSv[:, length:].transpose(1, 2).to(window_bvk.dtype)
    return y_bsv.to(x_bsv.dtype), last_bvk.clone(memory_format=torch.contiguous_format)


def row_forward(
    x_bsv: Tensor,
    window_bvk: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor,
    kept_s: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    """Compute outputs and last window, block by block."""
    compute = accumulate_dtype(x_bsv.dtype)
    weight_kv = weight_vk.to(compute).t().contiguous()
    bias_v = bias_v.to(compute)
    y_bsv = x_bsv.new_empty(x_bsv.shape)
    for start, stop in _blocks(x_bsv):
        ext_bSv = _extended(x_bsv, window_bvk, start, stop, compute)
        pre_blv = _taps(ext_bSv, weight_kv, bias_v)
        if kept_s is not None:
            pre_blv.masked_fill_(~kept_s[start:stop, None], 0)
        y_bsv[:, start:stop] = F.silu(pre_blv, inplace=True) if silu else pre_blv
    width = weight_vk.shape[1]
    recent_bvk = x_bsv[:, -width:].transpose(1, 2).to(window_bvk.dtype)
    last_bvk = torch.cat([window_bvk, recent_bvk], dim=2)[:, :, -width:]
    return y_bsv, last_bvk.contiguous()


def row_backward(
    grad_y_bsv: Tensor,
    grad_last_bvk: Tensor,
    x_bsv: Tensor,
    window_bvk: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor,
    kept_s: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of tokens, window, weight and bias (README 4)."""
    compute = accumulate_dtype(x_bsv.dtype)
    weight_kv = weight_vk.to(compute).t().contiguous()
    width = weight_vk.shape[1]
    # The last window copies tokens, from the one of this index on; a negative one is the window's.
    copied_from = x_bsv.shape[1] - width
    grad_last_bkv = grad_last_bvk.transpose(1, 2)
    grad_x_bsv = x_bsv.new_empty(x_bsv.shape)
    grad_weight_kv = torch.zeros_like(weight_kv)
    grad_bias_v = torch.zeros_like(bias_v, dtype=compute)
    # README 4: a token feeds the k - 1 outputs after it, so the walk is from the last block back.
    after_bKv = x_bsv.new_zeros(x_bsv.shape[0], width - 1, x_bsv.shape[2], dtype=compute)
    for start, stop in reversed(list(_blocks(x_bsv))):
        length = stop - start
        ext_bSv = _extended(x_bsv, window_bvk, start, stop, compute)
        grad_blv = grad_y_bsv[:, start:stop].to(compute)
        if silu:
            pre_blv = _taps(ext_bSv, weight_kv, bias_v.to(compute))
            grad_blv = torch.ops.aten.silu_backward(grad_blv, pre_blv)
        if kept_s is not None:
            grad_blv = grad_blv.masked_fill(~kept_s[start:stop, None], 0)
        grad_bias_v += grad_blv.sum(dim=(0, 1))
        for j in range(width):
            grad_weight_kv[j] += (grad_blv * ext_bSv[:, j : j + length]).sum(dim=(0, 1))
        grad_bSv = torch.cat([grad_blv, after_bKv], dim=1)
        grad_x_blv = _taps(grad_bSv, weight_kv.flip(0))
        first = max(start, copied_from)
        if first < stop:
            grad_x_blv[:, first - start :] += grad_last_bkv[
                :, first - copied_from : stop - copied_from
            ]
        grad_x_bsv[:, start:stop] = grad_x_blv
        after_bKv = grad_bSv[:, : width - 1]
    # The oldest column of the window meets no output: k zeros before `after` give it none.
    grad_window_bkv = _taps(F.pad(after_bKv, (0, 0, width, 0)), weight_kv.flip(0))
    if copied_from < 0:
        grad_window_bkv[:, copied_from:] += grad_last_bkv[:, :-copied_from]
    return (
        grad_x_bsv,
        grad_window_bkv.transpose(1, 2).to(window_bvk.dtype).contiguous(),
        grad_weight_kv.t().to(weight_vk.dtype).contiguous(),
        grad_bias_v.to(bias_v.dtype),
    )


def _blocks(x_bsv: Tensor) -> Iterator[tuple[int, int]]:
    """Cut the sequence; devices with large parallelism and no cache to fill take it whole."""
    batch, length, channels = x_bsv.shape
    rows = length
    if x_bsv.device.type == "cpu":
        rows = max(MIN_ROWS, BLOCK_ELEMENTS // (batch * channels))
    return ((start, min(start + rows, length)) for start in range(0, length, rows))


def _extended(
    x_bsv: Tensor, window_bvk: Tensor, start: int, stop: int, compute: torch.dtype
) -> Tensor:
    """Return tokens `start` to `stop` and the k - 1 columns before them."""
    before = window_bvk.shape[2] - 1
    if start >= before:
        return x_bsv[:, start - before : stop].to(compute)
    tail_bKv = window_bvk[:, :, 1 + start :].transpose(1, 2)
    return torch.cat([tail_bKv.to(compute), x_bsv[:, :stop].to(compute)], dim=1)


def _taps(ext_bSv: Tensor, weight_kv: Tensor, bias_v: Tensor | None = None) -> Tensor:
    """Return `bias + sum_j weight[j] * ext[t + j]` for every t that has k columns."""
    width = weight_kv.shape[0]
    length = ext_bSv.shape[1] - width + 1
    if bias_v is None:
        y_blv = ext_bSv[:, :length] * weight_kv[0]
    else:
        y_blv = torch.addcmul(bias_v, ext_bSv[:, :length], weight_kv[0])
    for j in range(1, width):
        y_blv.addcmul_(ext_bSv[:, j : j + length], weight_kv[j])
    return y_blv
