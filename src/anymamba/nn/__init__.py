"""The workshop: blocks and their states."""

from anymamba.nn.cache import (
    Mamba1Cache,
    Mamba2Cache,
    Mamba3Cache,
    Mamba3DoubleSsdCache,
    Mamba3SingleSsdCache,
    RotationState,
)

__all__ = [
    "Mamba1Cache",
    "Mamba2Cache",
    "Mamba3Cache",
    "Mamba3DoubleSsdCache",
    "Mamba3SingleSsdCache",
    "RotationState",
]
