"""Choosing tokens from logits in one call of a CPU kernel; see README.md."""

from anymamba.ops.choose.native import Chosen, TokenChooser, choosing_refusal

__all__ = ["Chosen", "TokenChooser", "choosing_refusal"]
