"""Blocks over several processes: the sequence, the heads and the batch, each on an axis of a mesh.

`parallelize` is the entry (`plan.py`). torch carries the bytes; what is here is what only a
recurrence needs. The sequence: states that pass from rank to rank (`context.py`, the mathematics of
each family in `context_blocks.py`, the messages in `ring.py`, packed rows in `shard.py`). Heads:
which rows of which weight a rank runs (`tensor.py`), as parameters that torch can shard, save and
optimise (`local.py`), and back to official tensors (`official.py`). The batch: torch's own replicas
and shards, and where those need help (`replicas.py`, `sharded.py`).
"""

from anymamba.nn.parallel.context import context_parallel
from anymamba.nn.parallel.official import fill_tensors, gather_tensors, official_shards
from anymamba.nn.parallel.plan import data_mesh, line_mesh, parallelize
from anymamba.nn.parallel.ring import Ring, Traffic

__all__ = [
    "Ring",
    "Traffic",
    "context_parallel",
    "data_mesh",
    "fill_tensors",
    "gather_tensors",
    "line_mesh",
    "official_shards",
    "parallelize",
]
