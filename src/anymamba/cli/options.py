"""Arguments that several commands share, and what they lead to."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from anymamba.errors import ConfigError

if TYPE_CHECKING:
    from anymamba.io import Tokenizer
    from anymamba.models import MambaLM

__all__ = ["DType", "ModelOptions", "SamplingOptions", "SpeakerOptions"]

DType = Literal["float32", "float64", "bfloat16", "float16"]
# What the published models were trained with; their own repositories hold no tokenizer.
KNOWN_TOKENIZERS = {50277: "EleutherAI/gpt-neox-20b", 128256: "meta-llama/Llama-3.1-8B"}


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A directory, or a name on the hub."""

    revision: Annotated[str | None, arg(metavar="NAME")] = None
    """Branch, tag or commit on the hub."""

    device: Annotated[str | None, arg(metavar="DEVICE")] = None
    """Where it runs, such as cpu or cuda."""

    dtype: Annotated[DType | None, arg(metavar="DTYPE")] = None
    """float32 (the default), float64, bfloat16 or float16."""

    a_activation: Annotated[Literal["heavy_tail", "softplus"] | None, arg(metavar="NAME")] = None
    """Mamba-3: heavy_tail or softplus, where the checkpoint does not say."""

    json: bool = False
    """Write JSON to stdout instead of text."""

    def load(self, **options: Any) -> "MambaLM":
        """Load the model; options are further ones of `load_pretrained`."""
        from anymamba.io import load_pretrained

        return load_pretrained(
            self.model,
            revision=self.revision,
            device=self.device,
            dtype=torch_dtype(self.dtype),
            a_activation=self.a_activation,
            **options,
        )

    def load_tokenizer(self, given: str | None, lm: "MambaLM") -> "Tokenizer":
        """Load the tokenizer that was asked for, or the one that belongs to the model."""
        from anymamba.io import ByteTokenizer, load_tokenizer

        if given is not None:
            return load_tokenizer(given)
        if os.path.isfile(os.path.join(self.model, "tokenizer.json")):
            return load_tokenizer(self.model)
        size = lm.config.vocab_size
        if size in (ByteTokenizer.vocab_size - 1, ByteTokenizer.vocab_size):
            return ByteTokenizer()
        if not os.path.isdir(self.model) and size not in KNOWN_TOKENIZERS:
            return load_tokenizer(self.model, revision=self.revision)
        hint = (
            f" This vocabulary may be that of {known}."
            if (known := KNOWN_TOKENIZERS.get(size))
            else ""
        )
        raise ConfigError(
            f"{self.model}: the model must come with a tokenizer.json; there is none beside it. "
            f"Pass --tokenizer with a file, a name on the hub, or 'bytes'.{hint}"
        )


@dataclass(frozen=True, kw_only=True)
class SpeakerOptions(ModelOptions):
    """Which language model writes, with which weights and tokenizer."""

    tokenizer: Annotated[str | None, arg(metavar="FILE")] = None
    """A tokenizer.json, a name on the hub, or bytes."""

    quantize: Annotated[Literal["int8", "int4"] | None, arg(metavar="NAME")] = None
    """Compute with int8 or int4 weights."""

    def load_speaker(self) -> "tuple[MambaLM, Tokenizer]":
        """Load the model and its tokenizer."""
        lm = self.load(quantize=self.quantize)
        return lm, self.load_tokenizer(self.tokenizer, lm)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen."""

    max_new_tokens: int = 256
    """At most this many new tokens."""

    temperature: float = 0.0
    """0 takes the likeliest token."""

    top_k: int = 0
    """Keep this many likeliest tokens; 0 means all."""

    top_p: float = 1.0
    """Keep the likeliest tokens up to this mass."""

    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the likeliest."""

    repetition_penalty: float = 1.0
    """Above 1: tokens of prompt and answer become less likely."""

    frequency_penalty: float = 0.0
    """Subtracted for each time a token was generated."""

    presence_penalty: float = 0.0
    """Subtracted once a token was generated."""

    seed: int = 0
    """The same seed draws the same tokens."""

    def sampling(self) -> dict[str, Any]:
        """Return the arguments of `anymamba.stream`."""
        names = SamplingOptions.__dataclass_fields__
        return {name: getattr(self, name) for name in names}


def torch_dtype(name: str | None) -> Any:
    """Return torch's dtype of that name."""
    import torch

    return None if name is None else getattr(torch, name)
