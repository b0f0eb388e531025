"""The training loss of a language model over several ranks: a module whose forward returns it."""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from anymamba.errors import ShapeError
from anymamba.models.lm import MambaLM
from anymamba.models.loss import next_token_targets
from anymamba.nn import data_mesh
from anymamba.ops import IGNORE, SsdPath

__all__ = ["LanguageLoss"]


class LanguageLoss(nn.Module):
    """The mean next-token cross-entropy over the tokens of all ranks.

    Ranks of one "cp" line are given the same whole rows and take their part themselves; ranks along
    "dp" are given different rows. The value is the mean over everything, the same on each rank. The
    gradient is this rank's share times the number of ranks: averaged over ranks, as DDP and FSDP2
    do, it is the gradient of the mean, however unevenly the counted tokens lie.

    Args:
        lm: the model.
        mesh: the one given to `parallelize`; None is a single process.

    Example:
        >>> import torch
        >>> from anymamba.models import MambaConfig
        >>> lm = MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=16))
        >>> ids_bs = torch.tensor([[1, 2, 3]])
        >>> bool(torch.isclose(LanguageLoss(lm)(ids_bs), lm.loss(ids_bs)))
        True
    """

    def __init__(self, lm: MambaLM, mesh: DeviceMesh | None = None) -> None:
        """Take the model, and find this rank's place."""
        super().__init__()
        self.lm = lm
        names = () if mesh is None else mesh.mesh_dim_names or ()
        self._rows = mesh["dp"].get_group() if mesh is not None and "dp" in names else None
        data = None if mesh is None else data_mesh(mesh)
        self._ranks = None if data is None else data.get_group()
        self._parts, self._part = 1, 0
        if mesh is not None and "cp" in names:
            self._parts, self._part = mesh["cp"].size(), mesh["cp"].get_local_rank()

    def forward(
        self,
        ids_bs: Tensor,
        targets_bs: Tensor | None = None,
        *,
        path: SsdPath | None = None,
        impl: str = "auto",
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of whole rows; the arguments are those of `MambaLM.loss`.

        Raises:
            ShapeError: the ranks of a "cp" line do not divide the length.
        """
        if targets_bs is None:
            targets_bs = next_token_targets(ids_bs, cu_seqlens, seq_idx)
        length = ids_bs.shape[1]
        if length % self._parts:
            raise ShapeError(
                f"LanguageLoss: the ranks that share a sequence must divide its length; got "
                f"{self._parts} ranks and {length} tokens. Pad the rows, with targets of {IGNORE}."
            )
        count = (targets_bs != IGNORE).sum()
        if self._rows is not None:
            dist.all_reduce(count, group=self._rows)
        here = slice(self._part * length // self._parts, (self._part + 1) * length // self._parts)
        total = self.lm.loss_sum(
            ids_bs[:, here],
            targets_bs[:, here],
            path=path,
            impl=impl,
            cu_seqlens=cu_seqlens,
            seq_idx=seq_idx,
        )
        mean = total / count.clamp(min=1)
        if self._ranks is None:
            return mean
        everybody = mean.detach().clone()
        dist.all_reduce(everybody, group=self._ranks)
        share = mean * dist.get_world_size(self._ranks)
        return share + (everybody - share.detach())
