"""The workshop: blocks, attention, layers and their states."""

from anymamba.nn.attention import MHA
from anymamba.nn.bidirectional import BidirectionalStack
from anymamba.nn.bidirectional_config import BidirectionalConfig
from anymamba.nn.block import Block
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
from anymamba.nn.cache_room import check_past, with_room, without_room
from anymamba.nn.count import count_parameters, flops_per_token, state_bytes
from anymamba.nn.mamba1 import Mamba
from anymamba.nn.mamba2 import Mamba2
from anymamba.nn.mamba3 import Mamba3
from anymamba.nn.mlp import GatedMLP
from anymamba.nn.norm import RMSNorm, RMSNormGated
from anymamba.nn.options import nearest
from anymamba.nn.parallel import (
    Ring,
    Traffic,
    context_parallel,
    data_mesh,
    fill_tensors,
    gather_tensors,
    line_mesh,
    official_shards,
    parallelize,
)
from anymamba.nn.plain import is_plain, project
from anymamba.nn.quantized import (
    SCHEMES,
    QuantizedEmbedding,
    QuantizedLinear,
    check_scheme,
    dequantize,
    quantize,
)
from anymamba.nn.registers import Cursor, Insertion, Marker, RegisterConfig, Registers
from anymamba.nn.residual import MultiGate, MultiGateResidual, ResidualConfig, depth_init_bias
from anymamba.nn.reversal import check_lengths, token_mask
from anymamba.nn.rotation import Rotation
from anymamba.nn.schedule import VirtualLayers, make_bidirectional_schedule, make_schedule
from anymamba.nn.stack import Stack, StackStep
from anymamba.nn.stack_cache import StackCache
from anymamba.nn.stack_config import MIXERS, LayerSpec, StackConfig, check_options
from anymamba.nn.stack_layer import Layer, add_norm

Mamba1 = Mamba

__all__ = [
    "MHA",
    "MIXERS",
    "SCHEMES",
    "BidirectionalConfig",
    "BidirectionalStack",
    "Block",
    "BlockCache",
    "Cursor",
    "GatedMLP",
    "Insertion",
    "KVCache",
    "Layer",
    "LayerSpec",
    "Mamba",
    "Mamba1",
    "Mamba1Cache",
    "Mamba2",
    "Mamba2Cache",
    "Mamba3",
    "Mamba3Cache",
    "Mamba3DoubleSsdCache",
    "Mamba3SingleSsdCache",
    "Marker",
    "ModelCache",
    "MultiGate",
    "MultiGateResidual",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "RMSNorm",
    "RMSNormGated",
    "RegisterConfig",
    "Registers",
    "ResidualConfig",
    "Ring",
    "Rotation",
    "RotationState",
    "Stack",
    "StackCache",
    "StackConfig",
    "StackStep",
    "Traffic",
    "VirtualLayers",
    "add_norm",
    "check_lengths",
    "check_options",
    "check_past",
    "check_scheme",
    "context_parallel",
    "count_parameters",
    "data_mesh",
    "depth_init_bias",
    "dequantize",
    "fill_tensors",
    "flops_per_token",
    "gather_tensors",
    "is_plain",
    "join_rows",
    "line_mesh",
    "make_bidirectional_schedule",
    "make_schedule",
    "nearest",
    "official_shards",
    "parallelize",
    "project",
    "quantize",
    "state_bytes",
    "token_mask",
    "with_room",
    "without_room",
]
