"""Blocks over several processes: the sequence, the heads and the batch, each on an axis of a mesh.

`parallelize` is the entry. torch carries the bytes; what is here is what only a recurrence needs:
states that pass from shard to shard (`context.py`), and heads that leave home (`tensor.py`).
"""

from anymamba.nn.parallel.context import context_parallel
from anymamba.nn.parallel.plan import data_mesh, parallelize
from anymamba.nn.parallel.ring import Ring, Traffic
from anymamba.nn.parallel.tensor import gather_tensors

__all__ = ["Ring", "Traffic", "context_parallel", "data_mesh", "gather_tensors", "parallelize"]
