"""The language model: embedding, stack, head, with official parameter names."""

import math
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.errors import BackendError, CacheError, DtypeError, ShapeError
from anymamba.models.config import MIXERS, MambaConfig
from anymamba.models.loss import head_loss, next_token_targets
from anymamba.nn import (
    MHA,
    GatedMLP,
    KVCache,
    Layer,
    ModelCache,
    RMSNorm,
    add_norm,
    empty_model_cache,
    is_plain,
    walk,
)
from anymamba.ops import SsdPath

__all__ = ["MambaLM", "use_checkpoints"]


class LmStep(NamedTuple):
    """Logits and the state after them."""

    logits: Tensor
    cache: ModelCache


class Checkpoints(Protocol):
    """What reads and writes models; `anymamba.io` provides it, so that this room knows no disk."""

    def load(self, name: str, **options: Any) -> "MambaLM": ...

    def save(self, model: "MambaLM", directory: Any, **options: Any) -> None: ...


_checkpoints: list[Checkpoints] = []


def use_checkpoints(checkpoints: Checkpoints) -> None:
    """Say who serves `from_pretrained` and `save_pretrained`."""
    _checkpoints[:] = [checkpoints]


class Backbone(nn.Module):
    """Embedding, layers and the final norm, under their official names."""

    def __init__(self, config: MambaConfig, factory: dict[str, Any]) -> None:
        """Create the parts."""
        super().__init__()
        self.embedding = nn.Embedding(config.padded_vocab_size, config.d_model, **factory)
        self.layers = nn.ModuleList(
            _layer(config, place, factory) for place in range(config.n_layer)
        )
        self.norm_f = _norm(config, factory)


class MambaLM(nn.Module):
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
        if self.config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

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
            impl: "auto", "portable", "native" or "reference".
            cu_seqlens: borders of packed sequences; batch must be 1.
            seq_idx: segment labels (batch, sequence).
        """
        how = {"path": path, "impl": impl, "cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
        hidden_bsd, _ = self._hidden(ids_bs, None, how)
        return self.lm_head(hidden_bsd[:, -num_last_tokens:])

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
        how = {"path": path, "impl": impl, "cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
        hidden_bsd, new = self._hidden(ids_bs, cache, how)
        return LmStep(self.lm_head(hidden_bsd[:, -num_last_tokens:]), new)

    def step(self, ids_b: Tensor, cache: ModelCache) -> LmStep:
        """Run one token: pure and differentiable; returns `(logits_bw, cache)`."""
        self._check_ids("MambaLM.step", ids_b, 1)
        self._check_cache("MambaLM.step", cache)
        x_bd = self.backbone.embedding(ids_b)
        branch, residual, layers = walk(
            self.backbone.layers, x_bd, cache.layers, lambda mixer, x, c: mixer.step(x, c)
        )
        logits_bw = self.lm_head(self._final(branch, residual))
        return LmStep(logits_bw, ModelCache(layers, cache.position_b + 1))

    @torch.no_grad()
    def step_(self, ids_b: Tensor, cache: ModelCache) -> Tensor:
        """Run one token and write the new state into the cache's own memory; inference only."""
        if any(isinstance(layer, KVCache) for layer in cache.layers):
            raise BackendError(
                "MambaLM.step_: keys and values of attention layers grow, so their cache cannot be "
                "updated in place. Use step, which returns a new cache."
            )
        logits_bw, new = self.step(ids_b, cache)
        cache.assign_(new)
        return logits_bw

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
            impl: "auto", "portable", "native" or "reference".
            cu_seqlens: borders of packed sequences; no prediction crosses one.
            seq_idx: segment labels; no prediction crosses a change.
        """
        if targets_bs is None:
            targets_bs = next_token_targets(ids_bs, cu_seqlens, seq_idx)
        how = {"path": path, "impl": impl, "cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
        hidden_bsd, _ = self._hidden(ids_bs, None, how)
        if is_plain(self.lm_head, nn.Linear):
            return head_loss(hidden_bsd, self.lm_head.weight, targets_bs)
        logits_sw = self.lm_head(hidden_bsd).flatten(0, 1)
        return F.cross_entropy(logits_sw.float(), targets_bs.flatten())

    def empty_cache(
        self,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> ModelCache:
        """Return the state before the first token."""
        return empty_model_cache(self.backbone.layers, batch_size, device=device, dtype=dtype)

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> "MambaLM":
        """Load a checkpoint from a directory or the hub; see `anymamba.io`."""
        return _service("from_pretrained").load(name, **options)

    def save_pretrained(self, directory: Any, **options: Any) -> None:
        """Write config and weights to a directory; see `anymamba.io`."""
        _service("save_pretrained").save(self, directory, **options)

    def extra_repr(self) -> str:
        """Name the family and the vocabulary."""
        return f"family={self.config.layer}, vocab_size={self.config.vocab_size}"

    def _hidden(
        self, ids_bs: Tensor, cache: ModelCache | None, how: dict[str, Any]
    ) -> tuple[Tensor, ModelCache]:
        """Return the normalised hidden states and the state after the piece."""
        where = "MambaLM"
        self._check_ids(where, ids_bs, 2)
        if cache is not None:
            self._check_cache(where, cache)
        caches = [None] * len(self.backbone.layers) if cache is None else cache.layers
        branch, residual, layers = walk(
            self.backbone.layers,
            self.backbone.embedding(ids_bs),
            caches,
            lambda mixer, x, c: mixer.prefill(x, c, **how),
        )
        position_b = _positions(ids_bs, cache, how["cu_seqlens"], how["seq_idx"])
        return self._final(branch, residual), ModelCache(layers, position_b)

    def _final(self, branch: Tensor, residual: Tensor | None) -> Tensor:
        norm = self.backbone.norm_f
        return add_norm(norm, branch, residual, self.config.residual_in_fp32)[0]

    def _check_ids(self, where: str, ids: Tensor, rank: int) -> None:
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
            given = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise DtypeError(f"{where}: token ids must be an int32 or int64 tensor; got {given}.")
        if ids.dim() != rank or ids.numel() == 0:
            axes = "(batch, sequence)" if rank == 2 else "(batch,)"
            raise ShapeError(
                f"{where}: token ids must have the axes {axes}, none empty; "
                f"got shape {tuple(ids.shape)}."
            )

    def _check_cache(self, where: str, cache: ModelCache) -> None:
        if not isinstance(cache, ModelCache):
            raise CacheError(
                f"{where}: the cache must be a ModelCache; got {type(cache).__name__}. "
                "Use lm.empty_cache(batch_size)."
            )
        if len(cache.layers) != len(self.backbone.layers):
            raise CacheError(
                f"{where}: the cache has {len(cache.layers)} layers, the model "
                f"{len(self.backbone.layers)}."
            )


def _service(what: str) -> Checkpoints:
    if not _checkpoints:
        raise BackendError(f"MambaLM.{what}: import anymamba (or anymamba.io) first.")
    return _checkpoints[0]


def _positions(
    ids_bs: Tensor, cache: ModelCache | None, cu_seqlens: Tensor | None, seq_idx: Tensor | None
) -> Tensor:
    """Return how many tokens each row of the new cache has seen."""
    batch, length = ids_bs.shape
    if seq_idx is not None:
        labels = seq_idx.to(ids_bs.device)
        # Counting from the end up to the last change of label.
        same = (labels == labels[:, -1:]).flip(1).int().cumprod(1).sum(1)
        start = 0 if cache is None else torch.where(same == length, cache.position_b, 0)
        return same.to(torch.int64) + start
    if cu_seqlens is not None:
        added = cu_seqlens.to(device=ids_bs.device, dtype=torch.int64).diff()
    else:
        added = torch.full((batch,), length, dtype=torch.int64, device=ids_bs.device)
    return added if cache is None else cache.position_b + added


def _norm(config: MambaConfig, factory: dict[str, Any]) -> nn.Module:
    kind = RMSNorm if config.rms_norm else nn.LayerNorm
    return kind(config.d_model, eps=1e-5, **factory)


def _layer(config: MambaConfig, place: int, factory: dict[str, Any]) -> Layer:
    if place in config.attn_layer_idx:
        mixer = MHA(config.d_model, layer_idx=place, **config.attn_cfg, **factory)
    else:
        block = MIXERS[config.layer]
        mixer = block(config.d_model, layer_idx=place, **config.mixer_options, **factory)
    norm = _norm(config, factory)
    if config.d_intermediate == 0:
        return Layer(norm, mixer, residual_in_fp32=config.residual_in_fp32)
    mlp = GatedMLP(config.d_model, config.d_intermediate, **factory)
    return Layer(norm, mixer, _norm(config, factory), mlp, config.residual_in_fp32)


def initialise(backbone: nn.Module, config: MambaConfig) -> None:
    """Draw weights as the official models do.

    Linear biases start at zero unless tagged, embeddings have deviation 0.02, and the projections
    back into the residual stream are scaled down by the root of the number of branches: one per
    layer, two with an MLP. (Official code means that too, but a second pass loses the MLP's half.)
    """
    branches = config.n_layer * (1 if config.d_intermediate == 0 else 2)
    for module in backbone.modules():
        if isinstance(module, nn.Linear):
            if module.bias is not None and not getattr(module.bias, "_no_reinit", False):
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    for name, parameter in backbone.named_parameters():
        if name.endswith(("out_proj.weight", "fc2.weight")):
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            with torch.no_grad():
                parameter /= math.sqrt(branches)
