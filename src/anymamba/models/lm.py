"""The language model: embedding, stack, head, with official parameter names."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from anymamba.models.checkpoints import checkpoints_for
from anymamba.models.config import MambaConfig
from anymamba.models.decoder import doubt_copies
from anymamba.models.initialise import initialise
from anymamba.models.inputs import check_ids
from anymamba.models.lm_token import LmStep, TokenVerbs
from anymamba.models.loss import (
    embed,
    head_loss_sum,
    logits_loss_sum,
    mean_loss,
    next_token_targets,
)
from anymamba.nn import (
    ModelCache,
    QuantizedEmbedding,
    QuantizedLinear,
    Stack,
    is_plain,
    project,
)
from anymamba.ops import SsdPath

__all__ = ["MambaLM"]


class LmLoss(NamedTuple):
    """A mean loss and the state after the piece it belongs to."""

    loss: Tensor
    cache: ModelCache


class Backbone(Stack):
    """Embedding, layers and the final norm, under their official names."""

    def __init__(self, config: MambaConfig, factory: dict[str, Any]) -> None:
        """Create the parts."""
        # The embedding comes first, as in official checkpoints.
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(config.padded_vocab_size, config.d_model, **factory)
        self.add_layers(config.stack, factory)


class MambaLM(TokenVerbs):
    """A language model of Mamba layers, attention layers where asked, and MLPs where asked.

    Parameters have the official names and shapes, so an official `state_dict` loads.

    Args:
        config: sizes and options.
        device: of the parameters.
        dtype: of the parameters; sensitive ones stay float32 beside half types.

    Example:
        >>> lm = MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=16))
        >>> lm(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 16])
    """

    def __init__(
        self,
        config: MambaConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create and initialise the parameters."""
        super().__init__()
        self.config = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.backbone = Backbone(config, factory)
        self.lm_head = nn.Linear(config.d_model, config.padded_vocab_size, bias=False, **factory)
        initialise(self.backbone, config)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Share the embedding with the head, if the config says so."""
        embedding, head = self.backbone.embedding, self.lm_head
        if not self.config.tie_embeddings:
            return
        if isinstance(head, QuantizedLinear) and isinstance(embedding, QuantizedEmbedding):
            head.values, head.scales = embedding.values, embedding.scales
        elif isinstance(head, nn.Linear) and isinstance(embedding, nn.Embedding):
            head.weight = embedding.weight

    def _apply(self, fn, recurse=True):  # pyright: ignore
        # A parameter stays one when it is moved. Buffers are moved one by one: a quantised head
        # would part from its embedding and take its bytes twice.
        embedding, head = self.backbone.embedding, self.lm_head
        is_tied = isinstance(head, QuantizedLinear) and head.values is embedding.values
        super()._apply(fn, recurse)
        if is_tied:
            self.tie_weights()
        return self

    def forward(
        self,
        ids_bs: Tensor,
        *,
        num_last_tokens: int = 0,
        path: SsdPath | None = None,
        impl: str = "auto",
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> Tensor:
        """Return logits (batch, sequence, padded vocabulary) of whole sequences.

        Args:
            ids_bs: token ids.
            num_last_tokens: compute the head for this many last positions only; 0 means all.
            path: SSD algorithm and chunk length.
            impl: of the mixers: "auto", "portable", "native" or "reference".
            cu_seqlens: borders of packed sequences; batch must be 1.
            seq_idx: segment labels (batch, sequence).
        """
        how = {"path": path, "impl": impl, "cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
        hidden_bsd = self._outputs(ids_bs, how)
        return project(self.lm_head, hidden_bsd[:, -num_last_tokens:])

    def prefill(
        self,
        ids_bs: Tensor,
        cache: ModelCache | None = None,
        *,
        num_last_tokens: int = 0,
        path: SsdPath | None = None,
        impl: str = "auto",
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> LmStep:
        """Run a piece of a sequence from a state to a state; returns `(logits, cache)`."""
        if not torch.compiler.is_compiling():
            # Behind a prompt come many tokens, and one careful look is nothing beside them.
            doubt_copies(self)
        how = {"path": path, "impl": impl, "cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
        hidden_bsd, new = self._hidden(ids_bs, cache, how)
        return LmStep(project(self.lm_head, hidden_bsd[:, -num_last_tokens:]), new)

    def loss(
        self,
        ids_bs: Tensor,
        targets_bs: Tensor | None = None,
        *,
        path: SsdPath | None = None,
        impl: str = "auto",
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> Tensor:
        """Return the mean next-token cross-entropy; never holds all logits.

        Args:
            ids_bs: token ids.
            targets_bs: the token each position predicts, -100 where none counts; the next token
                by default.
            path: SSD algorithm and chunk length.
            impl: of the mixers: "auto", "portable", "native" or "reference".
            cu_seqlens: borders of packed sequences; no prediction crosses one.
            seq_idx: segment labels; no prediction crosses a change.
        """
        how = {"path": path, "impl": impl, "cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
        if targets_bs is None:
            targets_bs = next_token_targets(ids_bs, cu_seqlens, seq_idx)
        return mean_loss(self._total(ids_bs, targets_bs, how), targets_bs)

    def prefill_loss(
        self,
        ids_bs: Tensor,
        targets_bs: Tensor | None = None,
        cache: ModelCache | None = None,
        *,
        path: SsdPath | None = None,
        impl: str = "auto",
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> LmLoss:
        """Return the loss of a piece of a sequence and the state after it: `(loss, cache)`.

        Truncated back-propagation through time is this call with `cache.detach()`. The arguments
        are those of `loss`, and the state before the piece.
        """
        if targets_bs is None:
            targets_bs = next_token_targets(ids_bs, cu_seqlens, seq_idx)
        how = {"path": path, "impl": impl, "cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
        self._check_piece(ids_bs, cache)
        x_bsd, weight_wd = embed(self.backbone.embedding, self.lm_head, ids_bs)
        hidden_bsd, new = self.backbone.sequence(x_bsd, cache, how, None)
        total = self._loss_sum(hidden_bsd, weight_wd, targets_bs)
        return LmLoss(mean_loss(total, targets_bs), new)

    def loss_sum(
        self,
        ids_bs: Tensor,
        targets_bs: Tensor,
        *,
        path: SsdPath | None = None,
        impl: str = "auto",
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> Tensor:
        """Return the summed cross-entropy; the arguments are those of `loss`.

        Sums of parts add up to that of the whole, means do not: see `LanguageLoss`.
        """
        how = {"path": path, "impl": impl, "cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
        return self._total(ids_bs, targets_bs, how)

    def empty_cache(
        self,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> ModelCache:
        """Return the state before the first token."""
        cache = self.backbone.empty_cache(batch_size, device=device, dtype=dtype)
        return cast("ModelCache", cache)

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> "MambaLM":
        """Load a checkpoint from a directory or the hub.

        Args:
            name: a folder, or a name on the hub.
            **options: those of `anymamba.io.load_pretrained`: `device`, `dtype`, `quantize` ("int8"
                or "int4"), `a_activation` (of Mamba-3), `revision`, `cache_dir`,
                `local_files_only`.

        Raises:
            CheckpointError: no such checkpoint, or a damaged one.
            ConfigError: options that contradict the checkpoint.
        """
        return checkpoints_for("from_pretrained").load(name, **options)

    def save_pretrained(self, directory: Any, **options: Any) -> None:
        """Write config and weights to a directory.

        Args:
            directory: made if it is not there.
            **options: those of `anymamba.io.save_pretrained`: `layout`, `format`, `dtype`,
                `max_shard_bytes`.

        Raises:
            CheckpointError: the model has no place in that layout, or the system refuses.
            ConfigError: options that contradict each other.
        """
        checkpoints_for("save_pretrained").save(self, directory, **options)

    def extra_repr(self) -> str:
        """Name the family and the vocabulary."""
        return f"family={self.config.layer}, vocab_size={self.config.vocab_size}"

    def _total(self, ids_bs: Tensor, targets_bs: Tensor, how: dict[str, Any]) -> Tensor:
        """Return the summed loss of whole sequences."""
        self._check_piece(ids_bs)
        x_bsd, weight_wd = embed(self.backbone.embedding, self.lm_head, ids_bs)
        return self._loss_sum(self.backbone.outputs(x_bsd, how, None), weight_wd, targets_bs)

    def _loss_sum(self, hidden_bsd: Tensor, weight_wd: Tensor | None, targets_bs: Tensor) -> Tensor:
        if weight_wd is not None:
            return head_loss_sum(hidden_bsd, weight_wd, targets_bs)
        # Piece by piece there is no bias: official heads have none, a head put in later may.
        if is_plain(self.lm_head, nn.Linear) and self.lm_head.bias is None:
            return head_loss_sum(hidden_bsd, self.lm_head.weight, targets_bs)
        return logits_loss_sum(self.lm_head(hidden_bsd), targets_bs)

    def _outputs(self, ids_bs: Tensor, how: dict[str, Any]) -> Tensor:
        """Return the normalised hidden states of whole sequences; no state is kept."""
        self._check_piece(ids_bs)
        return self.backbone.outputs(self.backbone.embedding(ids_bs), how, None)

    def _hidden(
        self, ids_bs: Tensor, cache: ModelCache | None, how: dict[str, Any]
    ) -> tuple[Tensor, ModelCache]:
        """Return the normalised hidden states and the state after the piece."""
        self._check_piece(ids_bs, cache)
        return self.backbone.sequence(self.backbone.embedding(ids_bs), cache, how, None)

    def _check_piece(self, ids_bs: Tensor, cache: ModelCache | None = None) -> None:
        where = "MambaLM"
        check_ids(where, ids_bs, 2)
        if cache is not None:
            self.backbone.check_cache(where, cache, is_needed=True)
