"""Mamba-1, Mamba-2 and Mamba-3 for PyTorch, on any device.

The mathematics is in `anymamba.ops`: pure functions on tensors.
"""

from anymamba import ops
from anymamba.ops import SsdPath

__all__ = ["SsdPath", "__version__", "ops"]

__version__ = "0.1.0.dev0"
