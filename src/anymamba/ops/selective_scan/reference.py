"""The selective scan as it is defined: one loop over time, gradients by autograd.

This file judges the others and is never optimised. It keeps every state alive until the backward
is over, so it is not for long sequences.
"""

from collections.abc import Iterator
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.ops.numerics import accumulate_dtype
from anymamba.ops.packing import Packing, packing

__all__ = ["selective_scan_reference"]


def selective_scan_reference(
    u_bsi: Tensor,
    dt_bsi: Tensor,
    a_ir: Tensor,
    b: Tensor,
    c: Tensor,
    skip_i: Tensor | None = None,
    initial_bir: Tensor | None = None,
    *,
    z_bsi: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token (README 2); arguments as in `selective_scan`.

    Shapes and dtypes are taken as they are: `selective_scan(..., impl="reference")` checks them.

    Returns:
        The outputs in the dtype of `u_bsi` and the final states in the dtype of accumulation.
    """
    compute = accumulate_dtype(u_bsi.dtype)
    batch, length, _ = u_bsi.shape
    pack = None
    if cu_seqlens is not None:
        pack = packing("selective_scan_reference", cu_seqlens, batch, length, u_bsi.device)
    if initial_bir is None:
        rows = batch if pack is None else pack.count
        initial_bir = torch.zeros(rows, *a_ir.shape, dtype=compute, device=u_bsi.device)
    y_bsi, final_bir = run_tokens(u_bsi, dt_bsi, a_ir, b, c, initial_bir, pack)
    return finish_outputs(y_bsi, u_bsi, skip_i, z_bsi), final_bir


def finish_outputs(
    y_bsi: Tensor, u_bsi: Tensor, skip_i: Tensor | None, z_bsi: Tensor | None
) -> Tensor:
    """Add the skip, apply the gate `silu(z)`, and round to the dtype of u."""
    compute = accumulate_dtype(u_bsi.dtype)
    if skip_i is not None:
        y_bsi = y_bsi + skip_i.to(compute) * u_bsi.to(compute)
    if z_bsi is not None:
        y_bsi = y_bsi * F.silu(z_bsi.to(compute))
    return y_bsi.to(u_bsi.dtype)


def run_tokens(
    u_bsi: Tensor,
    dt_bsi: Tensor,
    a_ir: Tensor,
    b: Tensor,
    c: Tensor,
    initial_bir: Tensor,
    pack: Packing | None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence without skip and gate; both results have the dtype of accumulation.

    In a packed row the state restarts at each sequence's first token and is read off at its last.
    """
    compute = accumulate_dtype(u_bsi.dtype)
    a_ir, initial_bir = a_ir.to(compute), initial_bir.to(compute)
    tokens = zip(
        u_bsi.to(compute).unbind(1),
        dt_bsi.to(compute).unbind(1),
        _over_time(b.to(compute), a_ir.shape[0]),
        _over_time(c.to(compute), a_ir.shape[0]),
        strict=False,
    )
    state_bir = initial_bir if pack is None else initial_bir[:1]
    states, outputs = [], []
    for token, (u_bi, dt_bi, b_bir, c_bir) in enumerate(tokens):
        if pack is not None:
            own_1ir = initial_bir.index_select(0, pack.sequence_s[token : token + 1])
            state_bir = torch.where(pack.position_s[token] == 0, own_1ir, state_bir)
        decay_bir = torch.exp(dt_bi[..., None] * a_ir)
        state_bir = decay_bir * state_bir + (dt_bi * u_bi)[..., None] * b_bir
        states.append(state_bir)
        outputs.append((c_bir * state_bir).sum(-1))
    y_bsi = torch.stack(outputs, 1)
    return y_bsi, state_bir if pack is None else pack.last(torch.stack(states, 1), initial_bir)


def _over_time(coefficient: Tensor, channels: int) -> Iterator[Tensor]:
    """Yield B or C of each token, broadcastable to (b, i, r)."""
    if coefficient.dim() == 2:
        return repeat(coefficient)
    if coefficient.dim() == 3:
        return (row_br[:, None] for row_br in coefficient.unbind(1))
    width = channels // coefficient.shape[2]
    return (row_bgr.repeat_interleave(width, 1) for row_bgr in coefficient.unbind(1))
