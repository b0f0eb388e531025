"""Mamba-1, Mamba-2 and Mamba-3 for PyTorch, on any device.

    block = Mamba3(d_model=768)              blocks: forward, prefill, step; the state is a value
    lm = MambaLM.from_pretrained("folder")   language models, official checkpoints
    generate(lm, [ids], max_new_tokens=64)   token ids in, token ids out
    verify(lm)                               every way of running a model is the same

The mathematics is in `anymamba.ops`: pure functions on tensors.
"""

from anymamba import ops
from anymamba.generate import generate, stream
from anymamba.io import load_state, save_state
from anymamba.models import LatentModel, MambaConfig, MambaLM, verify
from anymamba.nn import (
    BidirectionalStack,
    Mamba,
    Mamba1,
    Mamba1Cache,
    Mamba2,
    Mamba2Cache,
    Mamba3,
    Mamba3Cache,
    Mamba3DoubleSsdCache,
    Mamba3SingleSsdCache,
    ModelCache,
    RotationState,
)
from anymamba.ops import SsdPath
from anymamba.version import __version__

__all__ = [
    "BidirectionalStack",
    "LatentModel",
    "Mamba",
    "Mamba1",
    "Mamba1Cache",
    "Mamba2",
    "Mamba2Cache",
    "Mamba3",
    "Mamba3Cache",
    "Mamba3DoubleSsdCache",
    "Mamba3SingleSsdCache",
    "MambaConfig",
    "MambaLM",
    "ModelCache",
    "RotationState",
    "SsdPath",
    "__version__",
    "generate",
    "load_state",
    "ops",
    "save_state",
    "stream",
    "verify",
]
