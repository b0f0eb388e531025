"""A language model as a program of the CPU decoder: compiled once, checked at every token."""

from anymamba.models.decoder.compiled import decodable, is_decodable
from anymamba.models.decoder.decoder import (
    is_served,
    native_refusal,
    native_state,
    native_step,
    repeated_state,
    repeated_step,
)
from anymamba.models.decoder.known import doubt_copies, unchanged

__all__ = [
    "decodable",
    "doubt_copies",
    "is_decodable",
    "is_served",
    "native_refusal",
    "native_state",
    "native_step",
    "repeated_state",
    "repeated_step",
    "unchanged",
]
