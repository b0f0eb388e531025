"""One token of a whole model on the CPU kernel: the program that it reads, and the call.

`anymamba.models` knows how a model becomes a program; this folder knows the C interface.
"""

from anymamba.ops.decode.call import DecodeCall
from anymamba.ops.decode.program import (
    FORMATS,
    GROUP,
    Layer,
    Matrix,
    Norm,
    NormKind,
    Program,
    RotationKind,
    program_of,
)

__all__ = [
    "FORMATS",
    "GROUP",
    "DecodeCall",
    "Layer",
    "Matrix",
    "Norm",
    "NormKind",
    "Program",
    "RotationKind",
    "program_of",
]
