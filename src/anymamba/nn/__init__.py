"""The workshop: blocks and their states."""

from anymamba.nn.cache import (
    Mamba1Cache,
    Mamba2Cache,
    Mamba3Cache,
    Mamba3DoubleSsdCache,
    Mamba3SingleSsdCache,
    RotationState,
)
from anymamba.nn.mamba1 import Mamba
from anymamba.nn.mamba2 import Mamba2
from anymamba.nn.mamba3 import Mamba3
from anymamba.nn.norm import RMSNorm, RMSNormGated

Mamba1 = Mamba

__all__ = [
    "Mamba",
    "Mamba1",
    "Mamba1Cache",
    "Mamba2",
    "Mamba2Cache",
    "Mamba3",
    "Mamba3Cache",
    "Mamba3DoubleSsdCache",
    "Mamba3SingleSsdCache",
    "RMSNorm",
    "RMSNormGated",
    "RotationState",
]
