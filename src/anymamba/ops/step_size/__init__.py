"""Step sizes: the softplus of projected numbers and a bias, in one pass."""

from anymamba.ops.step_size.api import step_size

__all__ = ["step_size"]
