"""The end of a block: skip, gate, norm, merging of ranks; and the gated product of an MLP."""

from anymamba.ops.tail.api import gated_product, gated_tail

__all__ = ["gated_product", "gated_tail"]
