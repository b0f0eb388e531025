"""Values of several ranks, in one pass."""

from anymamba.ops.ranks.api import rank_values

__all__ = ["rank_values"]
