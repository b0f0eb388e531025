"""The structs of `native/src/decode_program.h`, field by field; that header explains them."""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from enum import IntEnum

__all__ = [
    "FORMATS",
    "GROUP",
    "Layer",
    "Matrix",
    "Norm",
    "NormKind",
    "Program",
    "RotationKind",
    "program_of",
]

# Channels that lie together in the weight of Mamba-1's step sizes.
GROUP = 16
FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}


class NormKind(IntEnum):
    """Which norm stands before a sublayer or behind a scan."""

    NONE = 0
    RMS = 1
    LAYER = 2


class RotationKind(IntEnum):
    """Which entries of a key turn together."""

    INTERLEAVED = 0
    HALF_SPLIT = 1
    QUATERNION = 2


class Matrix(ctypes.Structure):
    """A projection in its stored format; without rows where there is none."""

    _fields_ = (
        ("data", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("format", c_int64),
        ("rows", c_int64),
        ("columns", c_int64),
    )


class Norm(ctypes.Structure):
    """A norm over the last axis."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_double), ("kind", c_int64))


def _fields(kind: type, names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names.split())


class Layer(ctypes.Structure):
    """A mixer of any family (0 is attention), its norm, and perhaps an MLP."""

    _fields_ = (
        *_fields(c_int64, "family inner heads headdim state groups rank"),
        *_fields(Norm, "norm norm2"),
        *_fields(Matrix, "in_proj out_proj fc1 fc2"),
        *_fields(c_void_p, "conv_weight conv_bias"),
        *_fields(c_int64, "conv_width"),
        *_fields(c_void_p, "a skip dt_bias"),
        *_fields(Matrix, "x_proj"),
        *_fields(c_void_p, "dt_weight"),
        *_fields(c_int64, "dt_rank"),
        *_fields(c_double, "rates_eps"),
        *_fields(c_int64, "mlp has_skip_per_channel"),
        *_fields(Norm, "gate_norm"),
        *_fields(c_int64, "gate_group norm_before_gate"),
        *_fields(c_double, "dt_low dt_high"),
        *_fields(c_void_p, "b_norm c_norm b_bias c_bias mimo_x mimo_z mimo_o"),
        *_fields(c_double, "b_eps c_eps a_floor"),
        *_fields(c_int64, "is_heavy_tail rotation turns is_turned"),
        *_fields(c_double, "turn_scale turn_floor score_scale"),
    )


class Program(ctypes.Structure):
    """A whole model."""

    _fields_ = (
        *_fields(c_int64, "layer_bytes layers width"),
        *_fields(c_void_p, "layer"),
        *_fields(Matrix, "embedding"),
        *_fields(Norm, "norm"),
        *_fields(Matrix, "head"),
    )


def program_of(
    layers: Sequence[Layer], width: int, embedding: Matrix, norm: Norm, head: Matrix
) -> Program:
    """Put the parts together; the program keeps its layers alive, and nobody the weights."""
    stored = (Layer * len(layers))(*layers)
    program = Program(
        layer_bytes=ctypes.sizeof(Layer),
        layers=len(layers),
        width=width,
        layer=ctypes.addressof(stored),
        embedding=embedding,
        norm=norm,
        head=head,
    )
    program.stored = stored  # pyright: ignore[reportAttributeAccessIssue]
    return program
