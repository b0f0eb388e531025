"""Cross-entropy over a vocabulary: of logits, and of a head that never holds all of them."""

from anymamba.ops.loss.api import IGNORE, cross_entropy_rows, head_cross_entropy

__all__ = ["IGNORE", "cross_entropy_rows", "head_cross_entropy"]
