"""The workshop: blocks, attention, layers and their states."""

from anymamba.nn.attention import MHA
from anymamba.nn.block import Block, is_plain
from anymamba.nn.cache import (
    BlockCache,
    KVCache,
    Mamba1Cache,
    Mamba2Cache,
    Mamba3Cache,
    Mamba3DoubleSsdCache,
    Mamba3SingleSsdCache,
    ModelCache,
    RotationState,
    join_rows,
)
from anymamba.nn.count import count_parameters, flops_per_token, state_bytes
from anymamba.nn.mamba1 import Mamba
from anymamba.nn.mamba2 import Mamba2
from anymamba.nn.mamba3 import Mamba3
from anymamba.nn.mlp import GatedMLP
from anymamba.nn.norm import RMSNorm, RMSNormGated
from anymamba.nn.stack import Layer, add_norm, empty_model_cache, walk

Mamba1 = Mamba

__all__ = [
    "MHA",
    "Block",
    "BlockCache",
    "GatedMLP",
    "KVCache",
    "Layer",
    "Mamba",
    "Mamba1",
    "Mamba1Cache",
    "Mamba2",
    "Mamba2Cache",
    "Mamba3",
    "Mamba3Cache",
    "Mamba3DoubleSsdCache",
    "Mamba3SingleSsdCache",
    "ModelCache",
    "RMSNorm",
    "RMSNormGated",
    "RotationState",
    "add_norm",
    "count_parameters",
    "empty_model_cache",
    "flops_per_token",
    "is_plain",
    "join_rows",
    "state_bytes",
    "walk",
]
