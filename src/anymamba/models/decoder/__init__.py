"""A language model as a program of the CPU decoder: compiled once, checked at every token."""

from anymamba.models.decoder.decoder import (
    doubt_copies,
    native_refusal,
    native_step,
    unchanged,
)

__all__ = ["doubt_copies", "native_refusal", "native_step", "unchanged"]
