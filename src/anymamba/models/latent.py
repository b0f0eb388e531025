"""Models on continuous inputs: time series, pixels, audio frames, control.

    y = head(stack(in_proj(x)))            d_input -> d_model -> d_model -> d_output

A causal stack streams: `step` takes one time step and a state, and costs the same at any time.
Registers of the stack serve as class tokens: because `in_proj` is affine, a learnable row before it
could say nothing that one behind it cannot.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from anymamba.errors import BackendError, ConfigError, PackingError, ShapeError
from anymamba.models.latent_config import LatentConfig
from anymamba.models.loss import logits_loss_sum, mean_loss
from anymamba.models.stored import StoredModel
from anymamba.nn import BidirectionalConfig, BidirectionalStack, Stack, check_lengths, token_mask
from anymamba.ops import IGNORE, SsdPath, without_gradients

__all__ = ["LatentModel", "LatentStep"]


class LatentStep(NamedTuple):
    """Outputs and the state after them."""

    y: Tensor
    cache: Any  # ModelCache, or StackCache with registers


class LatentModel(StoredModel):
    """A projection, a stack and a head, on numbers instead of tokens.

    Args:
        config: sizes and options.
        device: of the parameters.
        dtype: of the parameters; sensitive ones stay float32 beside half types.

    Example:
        >>> from anymamba.nn import StackConfig
        >>> stack = StackConfig(d_model=8, n_layer=1, final_norm=True)
        >>> net = LatentModel(LatentConfig(d_input=3, d_output=2, stack=stack))
        >>> y, cache = net.step(torch.zeros(1, 3), net.empty_cache(1))
        >>> y.shape
        torch.Size([1, 2])
    """

    config: LatentConfig
    config_type: ClassVar[type] = LatentConfig

    def __init__(
        self,
        config: LatentConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the parameters."""
        super().__init__()
        self.config = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        width = config.stack.d_model
        self.in_proj = nn.Linear(config.d_input, width, **factory)
        if isinstance(config.stack, BidirectionalConfig):
            self.stack = BidirectionalStack(config.stack, **factory)
        else:
            self.stack = Stack(config.stack, **factory)
        self.head = nn.Linear(width, config.d_output, **factory)

    def forward(
        self,
        x: Tensor,
        *,
        lengths: Tensor | None = None,
        path: SsdPath | None = None,
        impl: str = "auto",
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> Tensor:
        """Run whole sequences.

        Args:
            x: inputs; (batch, sequence, d_input).
            lengths: time steps of each row of a padded batch (batch,).
            path: SSD algorithm and chunk length.
            impl: of the mixers: "auto", "portable", "native" or "reference".
            cu_seqlens: borders of packed sequences; with readout "each" only.
            seq_idx: segment labels (batch, sequence); with readout "each" only.

        Returns:
            (batch, sequence, d_output) with readout "each", registers included; else
            (batch, d_output).
        """
        where = "LatentModel"
        self._check_input(where, x, 3)
        self._check_packing(where, cu_seqlens, seq_idx)
        how = {"path": path, "impl": impl, "cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
        if isinstance(self.stack, BidirectionalStack):
            y_bsd = self.stack(self.in_proj(x), lengths=lengths, **how)
            lengths = self.stack.lengths_after(lengths)
            return self._read(y_bsd, lengths)
        if lengths is not None:
            check_lengths(where, lengths, *x.shape[:2])
            if self.stack.has_registers:
                raise PackingError(
                    f"{where}: registers of a causal stack stand at the same places in all rows, "
                    "so rows must be of one length. Leave lengths out, or the registers."
                )
        return self._read(self.stack(self.in_proj(x), **how), lengths)

    def prefill(
        self,
        x: Tensor,
        cache: Any = None,
        *,
        length: int | None = None,
        path: SsdPath | None = None,
        impl: str = "auto",
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> LatentStep:
        """Run a piece of a sequence from a state to a state; returns `(y, cache)`.

        The arguments are those of `Stack.prefill`. With readout "last" the output is that of the
        piece's last place; with "mean" there is no output of a piece.
        """
        where = "LatentModel.prefill"
        stack = self._streaming(where)
        self._check_input(where, x, 3)
        self._check_packing(where, cu_seqlens, seq_idx)
        how = {"path": path, "impl": impl, "cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
        y_bsd, new = stack.prefill(self.in_proj(x), cache, length=length, **how)
        return LatentStep(self._read(y_bsd, None), new)

    def step(self, x: Tensor, cache: Any) -> LatentStep:
        """Run one time step (batch, d_input): pure and differentiable; returns `(y, cache)`."""
        where = "LatentModel.step"
        stack = self._streaming(where)
        self._check_input(where, x, 2)
        y_bd, new = stack.step(self.in_proj(x), cache)
        return LatentStep(self.head(y_bd), new)

    @without_gradients
    def step_(self, x: Tensor, cache: Any) -> Tensor:
        """Run one time step and write the new state into the cache's own memory; inference only."""
        where = "LatentModel.step_"
        stack = self._streaming(where)
        self._check_input(where, x, 2)
        return self.head(stack.step_(self.in_proj(x), cache))

    def step_infinite(self, x: Tensor) -> Tensor:
        """Return the limit of the outputs under a constant input; Mamba-3 only."""
        where = "LatentModel.step_infinite"
        stack = self._streaming(where)
        self._check_input(where, x, 2)
        return self.head(stack.step_infinite(self.in_proj(x)))

    def prime(
        self, batch_size: int, cache: Any = None, *, length: int | None = None
    ) -> tuple[Tensor | None, Any]:
        """Run the registers that wait for the next time step; `(None, cache)` if none does."""
        y_bd, new = self._streaming("LatentModel.prime").prime(batch_size, cache, length=length)
        return None if y_bd is None else self.head(y_bd), new

    def empty_cache(self, batch_size: int, **options: Any) -> Any:
        """Return the state before the first time step; options as in `Stack.empty_cache`."""
        return self._streaming("LatentModel.empty_cache").empty_cache(batch_size, **options)

    def loss(self, x: Tensor, target: Tensor, *, lengths: Tensor | None = None) -> Tensor:
        """Return the mean loss of whole sequences.

        Args:
            x: inputs; (batch, sequence, d_input).
            target: regression: like the output. Classification: class ids, (batch, sequence) with
                readout "each" and (batch,) else; -100 does not count.
            lengths: time steps of each row of a padded batch; padding does not count.
        """
        y = self.forward(x, lengths=lengths)
        wanted = y.shape if self.config.task == "regression" else y.shape[:-1]
        if target.shape != wanted:
            raise ShapeError(
                f"LatentModel.loss: the target of {self.config.task} must have shape "
                f"{tuple(wanted)}; got {tuple(target.shape)}."
            )
        counts = None
        if self.config.readout == "each" and lengths is not None:
            counts = token_mask(lengths, y)
        if self.config.task == "classification":
            if counts is not None:
                target = target.masked_fill(~counts, IGNORE)
            return mean_loss(logits_loss_sum(y, target), target)
        wide = torch.promote_types(y.dtype, torch.float32)
        error = (y.to(wide) - target.to(wide)).square()
        if counts is None:
            return error.mean()
        # Not a product with the mask: a NaN in the padding of a target must not count either.
        error = error.masked_fill(~counts[..., None], 0.0)
        return error.sum() / (counts.sum() * y.shape[-1])

    def extra_repr(self) -> str:
        """Name the readout and the task."""
        return f"readout={self.config.readout!r}, task={self.config.task!r}"

    def _read(self, y_bsd: Tensor, lengths: Tensor | None) -> Tensor:
        if self.config.readout == "each":
            return self.head(y_bsd)
        if self.config.readout == "last":
            return self.head(last_of(y_bsd, lengths))
        return self.head(mean_of(y_bsd, lengths))

    def _streaming(self, where: str) -> Stack:
        if isinstance(self.stack, BidirectionalStack):
            raise BackendError(
                f"{where}: a bidirectional stack reads the end first, so it has no state to go on "
                "from. Use forward, or a StackConfig."
            )
        if self.config.readout == "mean":
            raise ConfigError(
                f"{where}: the mean of a sequence is known at its end only, so readout 'mean' "
                "cannot stream. Use forward, or readout='last'."
            )
        return self.stack

    def _check_packing(self, where: str, cu_seqlens: Tensor | None, seq_idx: Tensor | None) -> None:
        if (cu_seqlens is None and seq_idx is None) or self.config.readout == "each":
            return
        raise PackingError(
            f"{where}: a packed row has many ends, so the readout must be 'each'; it is "
            f"{self.config.readout!r}. Pad the batch and pass lengths."
        )

    def _check_input(self, where: str, x: Tensor, rank: int) -> None:
        axes = ("batch", "sequence", "d_input") if rank == 3 else ("batch", "d_input")
        wrong = not isinstance(x, Tensor) or x.dim() != rank or 0 in x.shape
        if wrong or x.shape[-1] != self.config.d_input:
            given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(
                f"{where}: the input must have the axes ({', '.join(axes)}), none empty, with "
                f"d_input={self.config.d_input}; got {given}."
            )


def last_of(y_bsd: Tensor, lengths: Tensor | None) -> Tensor:
    """Return the last place of each row (batch, width)."""
    if lengths is None:
        return y_bsd[:, -1]
    index_b11 = (lengths.to(y_bsd.device, torch.int64) - 1)[:, None, None]
    return y_bsd.gather(1, index_b11.expand(-1, 1, y_bsd.shape[2]))[:, 0]


def mean_of(y_bsd: Tensor, lengths: Tensor | None) -> Tensor:
    """Return the mean over the places of each row (batch, width), padding left out."""
    if lengths is None:
        return y_bsd.mean(1)
    mask_bs = token_mask(lengths, y_bsd)
    total_bd = y_bsd.masked_fill(~mask_bs[..., None], 0.0).sum(1)
    return total_bd / mask_bs.sum(1, keepdim=True)
