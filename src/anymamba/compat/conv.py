"""The functions of `causal_conv1d`, channels first."""

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.compat.arguments import (
    check_index,
    inference_only,
    is_silu,
    precision,
    require,
    segments_of,
    write_rows_,
)
from anymamba.errors import PackingError, ShapeError
from anymamba.notation import bind_dims
from anymamba.ops import ConvOutput, causal_conv1d, causal_conv1d_step

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states", "convolve"]


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Filter each channel over the last tokens, channels first.

        y[t] = act(bias + sum_j weight[j] x[t - (width - 1) + j])

    Args:
        x: (batch, dim, length).
        weight: (dim, width), the newest token's weight last; any width.
        bias: (dim,), or None.
        seq_idx: sequence of each token (batch, length), integers; the filter restarts where the
            label changes. Tokens with a negative label are padding: their output is zero.
        initial_states: the width - 1 inputs before the first token (batch, dim, width - 1).
        return_final_states: return the last width - 1 inputs too; they carry gradients.
        final_states_out: where to write them (batch, dim, width - 1); read only then.
        activation: None, "silu" or "swish".

    Returns:
        The output in the memory order of x, or the output and the final states.

    Raises:
        ShapeError: a rank or a size is wrong.
        DtypeError: an argument is no tensor, or float64 meets another precision.
        ConfigError: the activation is unknown.
        PackingError: `seq_idx` does not fit, or comes with states.

    Example:
        >>> causal_conv1d_fn(torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[10.0, 1.0]]))
        tensor([[[ 1., 12., 23.]]])
    """
    where = "causal_conv1d_fn"
    require(where, x=x, weight=weight)
    dims = bind_dims(where, x_bvs=x, weight_vk=weight, bias_v=bias)
    if seq_idx is not None and (initial_states is not None or return_final_states):
        raise PackingError(
            f"{where}: seq_idx goes with neither initial_states nor return_final_states, because "
            "each sequence would need states of its own. Leave one of them out, or use "
            "anymamba.ops.causal_conv1d with cu_seqlens."
        )
    window_bvk = None
    shape = (dims["b"], dims["v"], dims["k"] - 1)
    if initial_states is not None:
        _check_shape(where, "initial_states", initial_states, shape)
        window_bvk = F.pad(initial_states.to(x.dtype), (1, 0))
    y_bsv, last_bvk = convolve(
        where, x.transpose(1, 2), weight, bias, seq_idx, window_bvk, activation
    )
    y = y_bsv.transpose(1, 2)
    # The official result has the memory order of x, and callers take views of it.
    if x.stride(2) == 1 or x.stride(1) != 1:
        y = y.contiguous()
    if not return_final_states:
        return y
    final = last_bvk[:, :, 1:]
    if final_states_out is None:
        return y, final
    _check_shape(where, "final_states_out", final_states_out, shape)
    return y, final_states_out.copy_(final)


def convolve(
    where: str,
    x_bsv: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor | None,
    seq_idx: Tensor | None,
    window_bvk: Tensor | None,
    activation: str | None,
) -> ConvOutput:
    """Convolve with channels last; labels restart the filter, negative ones silence it."""
    act = "silu" if is_silu(where, activation) else None
    compute = precision(where, x=x_bsv, weight=weight_vk, bias=bias_v, window=window_bvk)
    if weight_vk.dtype != x_bsv.dtype:
        weight_vk = weight_vk.to(compute)
    bias_v = None if bias_v is None else bias_v.to(compute)
    if seq_idx is None:
        return causal_conv1d(x_bsv, weight_vk, bias_v, window_bvk, activation=act)
    batch, length = x_bsv.shape[:2]
    borders = segments_of(where, seq_idx, batch, length).cu_seqlens
    row_1sv = x_bsv.flatten(0, 1)[None]
    y_1sv, last_qvk = causal_conv1d(row_1sv, weight_vk, bias_v, activation=act, cu_seqlens=borders)
    y_bsv = y_1sv.view(x_bsv.shape).masked_fill((seq_idx < 0).unsqueeze(-1), 0)
    return ConvOutput(y_bsv, last_qvk)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Filter further tokens and update the state in place; inference only.

    The state is overwritten, so there is no backward: a gradient that arrives raises
    `BackendError`. `anymamba.ops.causal_conv1d` with a window is the differentiable form.

    Args:
        x: (batch, dim), or (batch, dim, length).
        conv_state: the last inputs (batch, dim, state_len), newest last, state_len >= width - 1;
            changed in place. With `conv_state_indices` the first axis is the pool's, any size.
        weight: (dim, width), the newest token's weight last.
        bias: (dim,), or None.
        activation: None, "silu" or "swish".
        cache_seqlens: tokens seen so far (batch,), integers. If given, the state is a circular
            buffer: x is written from column `cache_seqlens % state_len` on, and nothing moves.
        conv_state_indices: the pool's row of each batch row (batch,); a negative entry is
            padding: its output is zero and no state changes.

    Returns:
        The output like x.

    Raises:
        ShapeError: a rank or a size is wrong.
        DtypeError: an argument is no tensor, or float64 meets another precision.
        ConfigError: the activation is unknown.

    Example:
        >>> state = torch.tensor([[[1.0, 2.0]]])
        >>> causal_conv1d_update(torch.tensor([[3.0]]), state, torch.tensor([[10.0, 1.0]]))
        tensor([[23.]])
        >>> state
        tensor([[[2., 3.]]])
    """
    where = "causal_conv1d_update"
    require(where, x=x, conv_state=conv_state, weight=weight)
    if x.dim() not in (2, 3):
        raise ShapeError(
            f"{where}: x must have the axes (batch, dim) or (batch, dim, length); "
            f"got shape {tuple(x.shape)}."
        )
    with torch.no_grad():
        x_bvs = x.unsqueeze(-1) if x.dim() == 2 else x
        y = _update(
            where, x_bvs, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices
        )
        y = y.squeeze(-1) if x.dim() == 2 else y
    return inference_only(where, y, x, conv_state, weight, bias)


def _update(
    where: str,
    x_bvs: Tensor,
    pool: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor | None,
    activation: str | None,
    cache_seqlens: Tensor | None,
    indices: Tensor | None,
) -> Tensor:
    dims = bind_dims(where, x_bvs=x_bvs, weight_vk=weight_vk, bias_v=bias_v)
    precision(where, x=x_bvs, conv_state=pool, weight=weight_vk, bias=bias_v)
    index_b = None
    rows = dims["b"]
    if indices is not None:
        index_b = check_index(where, "conv_state_indices", indices, rows, pool.device)
        rows = pool.shape[0]
    columns = pool.shape[-1]
    if pool.dim() != 3 or pool.shape[:2] != (rows, dims["v"]) or columns < max(1, dims["k"] - 1):
        raise ShapeError(
            f"{where}: conv_state must have shape ({rows}, {dims['v']}, state_len) with state_len "
            f">= width - 1 = {dims['k'] - 1}, at least 1; got {tuple(pool.shape)}."
        )
    old = pool if index_b is None else pool.index_select(0, index_b.clamp(min=0))
    past = dims["k"] - 1
    if cache_seqlens is None:
        history = old[:, :, columns - past :]
        new = torch.cat([old, x_bvs.to(old.dtype)], dim=2)[:, :, -columns:]
    else:
        seen_b = check_index(where, "cache_seqlens", cache_seqlens, dims["b"], pool.device)
        history = old.gather(2, _columns(seen_b, -past, 0, old))
        # Of more tokens than columns only the newest stay; no column is written twice.
        kept = min(dims["s"], columns)
        goal = _columns(seen_b, dims["s"] - kept, dims["s"], old)
        new = old.scatter(2, goal, x_bvs[:, :, dims["s"] - kept :].to(old.dtype))
    y_bvs = _filter(where, x_bvs, history.to(x_bvs.dtype), weight_vk, bias_v, activation)
    write_rows_(pool, index_b, old, new)
    if index_b is None:
        return y_bvs
    return y_bvs.masked_fill((index_b < 0).view(-1, 1, 1), 0)


def _columns(seen_b: Tensor, start: int, stop: int, like: Tensor) -> Tensor:
    """Return the circular columns of the tokens `seen + start ... seen + stop - 1`."""
    offset = torch.arange(start, stop, device=seen_b.device)
    column = (seen_b.unsqueeze(1) + offset).remainder(like.shape[2])
    return column.unsqueeze(1).expand(-1, like.shape[1], -1)


def _filter(
    where: str,
    x_bvs: Tensor,
    history: Tensor,
    weight_vk: Tensor,
    bias_v: Tensor | None,
    activation: str | None,
) -> Tensor:
    window_bvk = F.pad(history, (1, 0))
    if x_bvs.shape[2] > 1:
        x_bsv = x_bvs.transpose(1, 2)
        y_bsv = convolve(where, x_bsv, weight_vk, bias_v, None, window_bvk, activation).y_bsv
        return y_bsv.transpose(1, 2).contiguous()
    act = "silu" if is_silu(where, activation) else None
    compute = precision(where, x=x_bvs, weight=weight_vk)
    weight_vk = weight_vk.to(compute)
    bias_v = None if bias_v is None else bias_v.to(compute)
    x_bv = x_bvs[:, :, 0]
    return causal_conv1d_step(x_bv, weight_vk, bias_v, window_bvk, activation=act).y_bv.unsqueeze(
        -1
    )


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """Return the last `state_len` inputs of each packed sequence, zeros before its first.

    Args:
        x: the tokens of all sequences (total, dim).
        cu_seqlens: borders of the sequences, integers, increasing from 0.
        state_len: how many columns a state has.

    Returns:
        (sequences, dim, state_len), newest last; carries gradients.

    Raises:
        ShapeError: x or the borders have the wrong rank.
        DtypeError: an argument is no tensor.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> causal_conv1d_varlen_states(x, torch.tensor([0, 2, 3]), 2)
        tensor([[[1., 2.]],
                [[0., 3.]]])
    """
    where = "causal_conv1d_varlen_states"
    require(where, x=x, cu_seqlens=cu_seqlens)
    bind_dims(where, x_sv=x, cu_seqlens_q=cu_seqlens)
    borders = cu_seqlens.to(device=x.device, dtype=torch.int64)
    column = torch.arange(-state_len, 0, device=x.device)
    token_qk = borders[1:, None] + column
    real_qk = token_qk >= borders[:-1, None]
    picked = x[token_qk.clamp(0, x.shape[0] - 1)]
    states_qkv = torch.where(real_qk.unsqueeze(-1), picked, picked.new_zeros(()))
    return states_qkv.transpose(1, 2)


def _check_shape(where: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    require(where, **{name: tensor})
    if tuple(tensor.shape) != shape:
        raise ShapeError(
            f"{where}: {name} must have shape {shape} (batch, dim, width - 1); "
            f"got {tuple(tensor.shape)}."
        )
