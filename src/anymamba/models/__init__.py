"""Language models: configuration, embedding, stack, head, loss, presets."""

from anymamba.models.activation import ActivationReport, compare_activations
from anymamba.models.config import MIXERS, MambaConfig
from anymamba.models.count import ModelCount, PartCount, count_model
from anymamba.models.lm import MambaLM, use_checkpoints
from anymamba.models.presets import PRESETS, preset
from anymamba.models.verify import verify
from anymamba.models.verify_report import VerifyReport, VerifyRow

__all__ = [
    "MIXERS",
    "PRESETS",
    "ActivationReport",
    "MambaConfig",
    "MambaLM",
    "ModelCount",
    "PartCount",
    "VerifyReport",
    "VerifyRow",
    "compare_activations",
    "count_model",
    "preset",
    "use_checkpoints",
    "verify",
]
