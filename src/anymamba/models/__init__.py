"""Language models, encoders and models on continuous inputs: a config, a stack, a head, a loss."""

from anymamba.models.activation import ActivationReport, compare_activations
from anymamba.models.checkpoints import use_checkpoints
from anymamba.models.config import MIXERS, MambaConfig
from anymamba.models.count import ModelCount, PartCount, count_model
from anymamba.models.decoder import native_refusal
from anymamba.models.encoder import Encoder, EncoderConfig, MaskedTokens, mask_tokens
from anymamba.models.hybrid import hybrid_config
from anymamba.models.language_loss import LanguageLoss
from anymamba.models.latent import LatentModel, LatentStep
from anymamba.models.latent_config import LatentConfig
from anymamba.models.lm import MambaLM
from anymamba.models.presets import PRESETS, preset
from anymamba.models.quantize import (
    outline_quantized,
    quantize_lm,
    quantized_modules,
    scheme_of,
    unlike_layers,
)
from anymamba.models.recompute import recompute_layers
from anymamba.models.stored import STORED_MODELS, StoredModel, use_model_files
from anymamba.models.verify import verify
from anymamba.models.verify_report import VerifyReport, VerifyRow

__all__ = [
    "MIXERS",
    "PRESETS",
    "STORED_MODELS",
    "ActivationReport",
    "Encoder",
    "EncoderConfig",
    "LanguageLoss",
    "LatentConfig",
    "LatentModel",
    "LatentStep",
    "MambaConfig",
    "MambaLM",
    "MaskedTokens",
    "ModelCount",
    "PartCount",
    "StoredModel",
    "VerifyReport",
    "VerifyRow",
    "compare_activations",
    "count_model",
    "hybrid_config",
    "mask_tokens",
    "native_refusal",
    "outline_quantized",
    "preset",
    "quantize_lm",
    "quantized_modules",
    "recompute_layers",
    "scheme_of",
    "unlike_layers",
    "use_checkpoints",
    "use_model_files",
    "verify",
]
