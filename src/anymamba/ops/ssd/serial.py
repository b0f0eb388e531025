"""The two algorithms that autograd differentiates: `minimal` and `serial`.

Both cut the sequence into chunks, run K1 to K3 and K5 on all chunks at once, and differ in K4: how
the state passes from chunk to chunk. They materialise (b, n, h, f, f) tensors; the recomputing
algorithm does not.
"""

import torch
from torch import Tensor

from anymamba.ops.packing import ChunkTable
from anymamba.ops.ssd.chunks import Chunks
from anymamba.ops.ssd.stages import (
    add_own,
    k1_ssd_chunk_cumsum,
    k2_ssd_bmm,
    k3_ssd_chunk_state,
    k4_ssd_state_passing,
    k5_ssd_chunk_scan,
    later,
    over_positions,
    own_pairs,
)

__all__ = ["ssd_core_minimal", "ssd_core_serial"]


def ssd_core_serial(
    v_bsmhp: Tensor,
    da_bsh: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    initial_bhpr: Tensor,
    scale_bsh: Tensor | None,
    own_bsh: Tensor | None,
    chunk_len: int,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run K1 to K5 with a loop over chunks in K4."""
    chunks = Chunks.cut(v_bsmhp, chunk_len, cu_seqlens)
    pass_on = k4_ssd_state_passing if chunks.table is None else _packed_loop(chunks.table)
    weights = scale_bsh, own_bsh
    return _run(chunks, v_bsmhp, da_bsh, b_bsmgr, c_bsmgr, initial_bhpr, *weights, pass_on)


def ssd_core_minimal(
    v_bsmhp: Tensor,
    da_bsh: Tensor,
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    initial_bhpr: Tensor,
    scale_bsh: Tensor | None,
    own_bsh: Tensor | None,
    chunk_len: int,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run K1 to K5 with K4 as one matrix product over all chunks."""
    chunks = Chunks.cut(v_bsmhp, chunk_len, cu_seqlens)
    pass_on = _product if chunks.table is None else _packed_product(chunks.table)
    weights = scale_bsh, own_bsh
    return _run(chunks, v_bsmhp, da_bsh, b_bsmgr, c_bsmgr, initial_bhpr, *weights, pass_on)


def _run(chunks: Chunks, v, da, b, c, initial_bhpr, scale, own, pass_on) -> tuple[Tensor, Tensor]:
    """Run the stages; no `scale` is 1, and no `own` is the scale, which saves its products."""
    v_bnfhp, b_bnfgr, c_bnfgr = (chunks.fused(x) for x in (v, b, c))
    fused = v_bnfhp.shape[2]
    scaled_bnfhp = v_bnfhp
    if scale is not None:
        scaled_bnfhp = over_positions(chunks.timed(scale), fused) * v_bnfhp
    decay = k1_ssd_chunk_cumsum(chunks.timed(da))
    cb_bngfF = k2_ssd_bmm(c_bnfgr, b_bnfgr)
    made_bnhpr = k3_ssd_chunk_state(scaled_bnfhp, b_bnfgr, decay)
    entry_bnhpr, final_bhpr = pass_on(made_bnhpr, decay.end(), initial_bhpr.to(chunks.compute))
    y_bnfhp = k5_ssd_chunk_scan(
        decay, scaled_bnfhp, c_bnfgr, cb_bngfF, entry_bnhpr, strict=own is not None
    )
    if own is not None:
        met_bnglmM = own_pairs(cb_bngfF, chunks.length)
        y_bnfhp = add_own(y_bnfhp, met_bnglmM, chunks.timed(own), v_bnfhp)
    return chunks.unfused(y_bnfhp, v), final_bhpr


def _product(made_bnhpr: Tensor, end_bnh: Tensor, initial_bhpr: Tensor) -> tuple[Tensor, Tensor]:
    """K4 without a loop: every state is a decayed sum of the initial one and all chunks before."""
    made_bNhpr = torch.cat([initial_bhpr.unsqueeze(1), made_bnhpr], 1)
    end_bNh = torch.cat([torch.zeros_like(end_bnh[:, :1]), end_bnh], 1)
    decay_bhnN = _border_decay(end_bNh.transpose(1, 2))
    states_bnhpr = torch.einsum("bhnN,bNhpr->bnhpr", decay_bhnN, made_bNhpr)
    # A copy: the final state must not keep all the others alive.
    return states_bnhpr[:, :-1], states_bnhpr[:, -1].clone()


def _border_decay(end_hn: Tensor, same_nn: Tensor | None = None) -> Tensor:
    """Return the decay from the end of one chunk to the end of a later one: (..., h, n, n).

    Each entry is summed by itself. A difference of two running sums would lose the small decay
    between neighbours late in a long sequence, where both sums are large.

    Args:
        end_hn: log-decay of whole chunks.
        same_nn: which chunks belong to one sequence; all when omitted.
    """
    chunks = end_hn.shape[-1]
    later_nn = later(chunks, end_hn.device)
    steps_hnn = end_hn.unsqueeze(-1).expand(*end_hn.shape, chunks).masked_fill(~later_nn, 0)
    reach_nn = later_nn if same_nn is None else later_nn & same_nn
    decay_hnn = steps_hnn.cumsum(-2).masked_fill(~reach_nn, -torch.inf).exp()
    return decay_hnn + torch.eye(chunks, dtype=end_hn.dtype, device=end_hn.device)


def _packed_loop(table: ChunkTable):
    def pass_on(made_1nhpr, end_1nh, initial_qhpr):
        spare = torch.zeros_like(initial_qhpr[:1])
        start_nhpr = torch.cat([initial_qhpr, spare])[table.sequence_n]
        decay_n = end_1nh[0].exp()[..., None, None]
        state = spare[0]
        entries, exits = [], []
        for place, made_hpr in enumerate(made_1nhpr[0].unbind(0)):
            state = torch.where(table.is_first_n[place], start_nhpr[place], state)
            entries.append(state)
            state = torch.addcmul(made_hpr, decay_n[place], state)
            exits.append(state)
        return torch.stack(entries).unsqueeze(0), _finals(table, torch.stack(exits), initial_qhpr)

    return pass_on


def _packed_product(table: ChunkTable):
    def pass_on(made_1nhpr, end_1nh, initial_qhpr):
        # The initial state of a sequence enters with its first chunk, decayed by that chunk.
        spare = torch.zeros_like(initial_qhpr[:1])
        start_nhpr = torch.cat([initial_qhpr, spare])[table.sequence_n]
        first_n111 = table.is_first_n[:, None, None, None]
        start_nhpr = torch.where(first_n111, start_nhpr, 0)
        decay_n = end_1nh[0].exp()[..., None, None]
        made_Nhpr = torch.addcmul(made_1nhpr[0], decay_n, start_nhpr)
        same_nn = table.sequence_n[:, None] == table.sequence_n
        decay_hnN = _border_decay(end_1nh[0].mT, same_nn)
        exit_nhpr = torch.einsum("hnN,Nhpr->nhpr", decay_hnN, made_Nhpr)
        before_nhpr = torch.cat([spare, exit_nhpr[:-1]])
        entry_nhpr = torch.where(first_n111, start_nhpr, before_nhpr)
        return entry_nhpr.unsqueeze(0), _finals(table, exit_nhpr, initial_qhpr)

    return pass_on


def _finals(table: ChunkTable, exit_nhpr: Tensor, initial_qhpr: Tensor) -> Tensor:
    """Pick the state after each sequence's last chunk; an empty sequence keeps its initial one."""
    chunks = exit_nhpr.shape[0]
    picked_qhpr = exit_nhpr[table.last_chunk_q.clamp(max=chunks - 1)]
    return torch.where(
        (table.last_chunk_q < chunks)[:, None, None, None], picked_qhpr, initial_qhpr
    )
