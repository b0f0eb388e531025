"""`MambaLMHeadModel` as `mamba_ssm` calls it: a `MambaLM` with the official call and result."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.errors import ShapeError
from anymamba.generate import generate_detailed
from anymamba.models import MambaConfig, MambaLM

__all__ = ["CausalLMOutput", "GenerationOutput", "MambaLMHeadModel"]


class CausalLMOutput(NamedTuple):
    """What the official model's forward returns."""

    logits: Tensor


class GenerationOutput(NamedTuple):
    """What official generation returns on request: whole sequences, prompt included."""

    sequences: Tensor


class MambaLMHeadModel(MambaLM):
    """The language model under its official name, with its official signatures.

    Args:
        config: sizes and options; `MambaConfig` or the official dataclass.
        initializer_cfg: accepted for compatibility; must be empty.
        device: of the parameters.
        dtype: of the parameters.

    Example:
        >>> model = MambaLMHeadModel(MambaConfig(d_model=8, n_layer=1, vocab_size=16))
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> model(ids).logits.shape, model.generate(ids, max_length=5).shape
        (torch.Size([1, 3, 16]), torch.Size([1, 5]))
    """

    def __init__(
        self,
        config: Any,
        initializer_cfg: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create and initialise the parameters."""
        if initializer_cfg:
            raise ValueError(
                f"MambaLMHeadModel: initializer_cfg must be empty; got {initializer_cfg}."
            )
        if not isinstance(config, MambaConfig):
            config = MambaConfig.from_dict(vars(config))
        super().__init__(config, device, dtype)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        inference_params: Any = None,
        num_last_tokens: int = 0,
        **mixer_kwargs: Any,
    ) -> CausalLMOutput:
        """Return logits in a named tuple; with `inference_params` continue its state.

        Args:
            input_ids: token ids (batch, sequence).
            position_ids: accepted for compatibility; the model has no use for them.
            inference_params: the official object; its dictionary then holds our cache under -1.
            num_last_tokens: compute the head for this many last positions only; 0 means all.
            **mixer_kwargs: `seq_idx`, `cu_seqlens`, and our `path` and `impl`.
        """
        if inference_params is None:
            logits = super().forward(input_ids, num_last_tokens=num_last_tokens, **mixer_kwargs)
            return CausalLMOutput(logits)
        caches = inference_params.key_value_memory_dict
        start = caches.get(-1) if inference_params.seqlen_offset > 0 else None
        logits, caches[-1] = self.prefill(
            input_ids, start, num_last_tokens=num_last_tokens, **mixer_kwargs
        )
        return CausalLMOutput(logits)

    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        min_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        repetition_penalty: float = 1.0,
        eos_token_id: int | None = None,
        seed: int = 0,
        **ignored: Any,
    ) -> Tensor | GenerationOutput:
        """Return whole sequences up to `max_length`, prompt included; greedy by default.

        Rows that end early are filled with `eos_token_id`. Further official arguments steer CUDA
        graphs and timing; they are accepted and have no effect.
        """
        batch, length = input_ids.shape
        if max_length <= length:
            raise ShapeError(
                f"MambaLMHeadModel.generate: max_length counts the prompt of {length} tokens, so "
                f"it must be larger; got {max_length}."
            )
        output = generate_detailed(
            self,
            input_ids,
            max_new_tokens=max_length - length,
            temperature=0.0 if top_k == 1 else temperature,
            top_k=0 if top_k == 1 else top_k,
            top_p=top_p if 0 < top_p < 1 else 1.0,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop_ids=() if eos_token_id is None else (eos_token_id,),
        )
        longest = max(len(ids) for ids in output.ids)
        filled = [ids + [eos_token_id or 0] * (longest - len(ids)) for ids in output.ids]
        new = torch.tensor(filled, dtype=input_ids.dtype, device=input_ids.device)
        sequences = torch.cat([input_ids, new.view(batch, longest)], dim=1)
        return GenerationOutput(sequences) if return_dict_in_generate else sequences

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> "MambaLMHeadModel":
        """Load a checkpoint from a directory or the hub."""
        loaded = MambaLM.from_pretrained(name, **options)
        model = cls(loaded.config, device="meta")
        model.load_state_dict(loaded.state_dict(), strict=True, assign=True)
        model.tie_weights()
        return model
