"""Language models: configuration, embedding, stack, head, loss, presets."""

from anymamba.models.config import MIXERS, MambaConfig
from anymamba.models.lm import MambaLM, use_checkpoints
from anymamba.models.presets import PRESETS, preset

__all__ = ["MIXERS", "PRESETS", "MambaConfig", "MambaLM", "preset", "use_checkpoints"]
