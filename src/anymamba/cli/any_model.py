"""Commands that take the folder of any model, not of language models alone."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anymamba.cli.options import ModelOptions, torch_dtype

if TYPE_CHECKING:
    from anymamba.models import MambaLM, StoredModel

__all__ = ["AnyModelOptions"]


@dataclass(frozen=True, kw_only=True)
class AnyModelOptions(ModelOptions):
    """Which model, and how it is loaded; a folder says itself what it holds."""

    def load_any(self) -> "MambaLM | StoredModel":
        """Load the model: a language model, a `LatentModel` or an `Encoder`."""
        from anymamba.io import load_model

        options: dict[str, Any] = {"a_activation": self.a_activation}
        return load_model(
            self.model,
            revision=self.revision,
            device=self.device,
            dtype=torch_dtype(self.dtype),
            **options,
        )
