"""Encoders: token ids in, and out comes what the head says.

pooled    one vector per sequence: an embedding, or logits of its class
tokens    logits of a class for every token
masked    logits over the vocabulary for every token; trained on tokens that were hidden
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.errors import ConfigError, ShapeError
from anymamba.models.inputs import check_ids
from anymamba.models.latent import mean_of
from anymamba.models.latent_config import check_keys, stack_config_from_dict
from anymamba.models.loss import head_loss_sum, logits_loss_sum, mean_loss
from anymamba.models.stored import StoredModel
from anymamba.nn import BidirectionalConfig, BidirectionalStack, token_mask
from anymamba.ops import IGNORE, SsdPath

__all__ = ["Encoder", "EncoderConfig", "MaskedTokens", "mask_tokens"]

HEADS = ("pooled", "tokens", "masked")
POOLS = ("mean", "register")


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes and options of an `Encoder`.

    Args:
        vocab_size: number of tokens, the mask among them.
        stack: what lies between embedding and head; `final_norm=True` puts a norm before the head.
        head: "pooled", "tokens" or "masked".
        n_classes: of "pooled" and "tokens"; None with "pooled" returns the pooled vector itself,
            and with "masked" there are none.
        pool: for "pooled": the "mean" over tokens, or the first "register" of the stack.

    Example:
        >>> stack = BidirectionalConfig(d_model=8, n_layer=2, final_norm=True)
        >>> config = EncoderConfig(vocab_size=16, stack=stack, head="masked")
        >>> EncoderConfig.from_dict(config.to_dict()) == config
        True
    """

    vocab_size: int
    stack: BidirectionalConfig
    head: str = "pooled"
    n_classes: int | None = None
    pool: str = "mean"

    def __post_init__(self) -> None:
        """Check sizes and names, and that they go together."""
        where = "EncoderConfig"
        if self.vocab_size < 1:
            raise ConfigError(f"{where}: vocab_size must be positive; got {self.vocab_size}.")
        if not isinstance(self.stack, BidirectionalConfig):
            raise ConfigError(
                f"{where}: stack must be a BidirectionalConfig; got {type(self.stack).__name__}."
            )
        for name, known in (("head", HEADS), ("pool", POOLS)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{where}: {name} must be one of {', '.join(known)}; "
                    f"got {getattr(self, name)!r}."
                )
        has_classes = self.n_classes is not None and self.n_classes > 0
        if (self.head == "tokens") > has_classes or (self.head == "masked" and has_classes):
            raise ConfigError(
                f"{where}: head 'tokens' needs n_classes and head 'masked' has the vocabulary; "
                f"got head={self.head!r}, n_classes={self.n_classes}."
            )
        if self.n_classes is not None and self.n_classes < 1:
            raise ConfigError(f"{where}: n_classes must be positive; got {self.n_classes}.")
        if self.pool == "register" and (self.head != "pooled" or self.stack.registers is None):
            raise ConfigError(
                f"{where}: pool 'register' needs head 'pooled' and a register in the stack. "
                "Use stack.registers=RegisterConfig(stack=[Marker.start()])."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        entries = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**entries, "stack": self.stack.to_dict()}

    @classmethod
    def from_dict(cls, entries: dict[str, Any]) -> "EncoderConfig":
        """Build from the result of `to_dict`; an unknown key is refused."""
        check_keys("EncoderConfig", entries, [entry.name for entry in fields(cls)])
        return cls(**{**entries, "stack": stack_config_from_dict(entries["stack"])})


class Encoder(StoredModel):
    """An embedding, a bidirectional stack, and one head.

    There is one head, so that every parameter of the model is used by its loss. The masked head
    shares the embedding's weight.

    Args:
        config: sizes and options.
        device: of the parameters.
        dtype: of the parameters; sensitive ones stay float32 beside half types.

    Example:
        >>> stack = BidirectionalConfig(d_model=8, n_layer=2, final_norm=True)
        >>> encoder = Encoder(EncoderConfig(vocab_size=16, stack=stack))
        >>> encoder(torch.tensor([[1, 2, 3], [4, 5, 0]]), lengths=torch.tensor([3, 2])).shape
        torch.Size([2, 8])
    """

    config: EncoderConfig
    config_type: ClassVar[type] = EncoderConfig

    def __init__(
        self,
        config: EncoderConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the parameters; the embedding has deviation 0.02."""
        super().__init__()
        self.config = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(config.vocab_size, config.stack.d_model, **factory)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.stack = BidirectionalStack(config.stack, **factory)
        if config.n_classes is not None:
            self.head = nn.Linear(config.stack.d_model, config.n_classes, **factory)

    def forward(
        self,
        ids_bs: Tensor,
        *,
        lengths: Tensor | None = None,
        path: SsdPath | None = None,
        impl: str = "auto",
    ) -> Tensor:
        """Return what the head says about whole sequences.

        Args:
            ids_bs: token ids.
            lengths: tokens of each row of a padded batch (batch,); padding changes nothing.
            path: SSD algorithm and chunk length.
            impl: of the mixers: "auto", "portable", "native" or "reference".

        Returns:
            pooled: (batch, d_model), or (batch, n_classes). tokens: (batch, sequence, n_classes).
            masked: (batch, sequence, vocab_size).
        """
        y_bd = self._hidden(ids_bs, lengths, {"path": path, "impl": impl})
        if self.config.head == "masked":
            return F.linear(y_bd, self.embedding.weight)
        return y_bd if self.config.n_classes is None else self.head(y_bd)

    def loss(
        self, ids_bs: Tensor, targets: Tensor, *, lengths: Tensor | None = None, **how: Any
    ) -> Tensor:
        """Return the mean cross-entropy; never holds all logits of a vocabulary.

        Args:
            ids_bs: token ids; for "masked" what `mask_tokens` returned.
            targets: the class of each sequence (batch,) or of each token (batch, sequence), or the
                hidden tokens; -100 and padding do not count.
            lengths: tokens of each row of a padded batch.
            **how: `path` and `impl`.
        """
        if self.config.head == "pooled" and self.config.n_classes is None:
            raise ConfigError(
                "Encoder.loss: a pooled embedding has no classes to be compared with; n_classes is "
                "None. Compare embeddings in a loss of your own."
            )
        wanted = ids_bs.shape[:1] if self.config.head == "pooled" else ids_bs.shape
        if targets.shape != wanted:
            raise ShapeError(
                f"Encoder.loss: targets of head {self.config.head!r} must have shape "
                f"{tuple(wanted)}; got {tuple(targets.shape)}."
            )
        if self.config.head != "pooled" and lengths is not None:
            mask_bs = token_mask(lengths, ids_bs)
            targets = targets.masked_fill(~mask_bs, IGNORE)
        if self.config.head == "masked":
            hidden_bsd = self._hidden(ids_bs, lengths, how)
            total = head_loss_sum(hidden_bsd, self.embedding.weight, targets)
        else:
            total = logits_loss_sum(self.forward(ids_bs, lengths=lengths, **how), targets)
        return mean_loss(total, targets)

    def extra_repr(self) -> str:
        """Name the head."""
        return f"head={self.config.head!r}, n_classes={self.config.n_classes}"

    def _hidden(self, ids_bs: Tensor, lengths: Tensor | None, how: dict[str, Any]) -> Tensor:
        """Return what the head reads: a vector per token, or one per sequence."""
        check_ids("Encoder", ids_bs, 2)
        y_bsd = self.stack(self.embedding(ids_bs), lengths=lengths, **how)
        length = ids_bs.shape[1]
        if self.config.head == "pooled" and self.config.pool == "register":
            return self.stack.registers_of(y_bsd, length, lengths)[:, 0]
        tokens_bsd = self.stack.tokens_of(y_bsd, length, lengths)
        return mean_of(tokens_bsd, lengths) if self.config.head == "pooled" else tokens_bsd


class MaskedTokens(NamedTuple):
    """Ids with some of them hidden, and the hidden ones as targets: -100 elsewhere."""

    ids_bs: Tensor
    targets_bs: Tensor


def mask_tokens(
    ids_bs: Tensor,
    *,
    mask_id: int,
    vocab_size: int,
    rate: float = 0.15,
    lengths: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> MaskedTokens:
    """Hide tokens at random, to be guessed from both sides.

    Of the chosen tokens 8 in 10 become `mask_id`, 1 in 10 a random token, and 1 in 10 stay, so that
    a model cannot rely on seeing a mask where it is asked. At least one token of a batch is chosen.

    Args:
        ids_bs: token ids.
        mask_id: the token that hides others.
        vocab_size: random tokens are below this.
        rate: share of tokens that are chosen; in (0, 1].
        lengths: tokens of each row of a padded batch; padding is not chosen.
        generator: of the random numbers, on the device of the ids.

    Raises:
        ConfigError: a rate out of range, or a mask that is no token.

    Example:
        >>> random = torch.Generator().manual_seed(0)
        >>> ids, targets = mask_tokens(torch.arange(8)[None], mask_id=9, vocab_size=10, rate=0.5,
        ...                            generator=random)
        >>> bool((targets[targets >= 0] == torch.arange(8)[None][targets >= 0]).all())
        True
    """
    check_ids("mask_tokens", ids_bs, 2)
    if not 0 < rate <= 1 or not 0 <= mask_id < vocab_size:
        raise ConfigError(
            f"mask_tokens: rate must lie in (0, 1] and mask_id below vocab_size {vocab_size}; got "
            f"rate={rate}, mask_id={mask_id}."
        )
    draw_bs = torch.rand(ids_bs.shape, generator=generator, device=ids_bs.device)
    draw_bs = draw_bs.masked_fill(~token_mask(lengths, ids_bs), 2.0)
    chosen_bs = (draw_bs < rate) | (draw_bs == draw_bs.min())
    targets_bs = ids_bs.masked_fill(~chosen_bs, IGNORE)
    # A second draw decides what becomes of the chosen ones.
    fate_bs = torch.rand(ids_bs.shape, generator=generator, device=ids_bs.device)
    other_bs = torch.randint(
        vocab_size, ids_bs.shape, generator=generator, device=ids_bs.device, dtype=ids_bs.dtype
    )
    hidden_bs = ids_bs.masked_fill(chosen_bs & (fate_bs < 0.8), mask_id)
    hidden_bs = torch.where(chosen_bs & (fate_bs >= 0.9), other_bs, hidden_bs)
    return MaskedTokens(hidden_bs, targets_bs)
