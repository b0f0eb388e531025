"""The SSD core: one scan behind Mamba-2 and Mamba-3, in three algorithms. See README.md."""

from anymamba.ops.ssd.api import (
    CoreOutput,
    SsdOutput,
    SsdStep,
    add_skip,
    initial_state,
    ssd,
    ssd_core,
    ssd_step,
)
from anymamba.ops.ssd.path import Mamba2SsdPath, Mamba3SsdPath, SsdPath
from anymamba.ops.ssd.schema import SSD_CORE
from anymamba.ops.ssd.stages import (
    ChunkDecay,
    k1_ssd_chunk_cumsum,
    k2_ssd_bmm,
    k3_ssd_chunk_state,
    k4_ssd_state_passing,
    k5_ssd_chunk_scan,
)

__all__ = [
    "SSD_CORE",
    "ChunkDecay",
    "CoreOutput",
    "Mamba2SsdPath",
    "Mamba3SsdPath",
    "SsdOutput",
    "SsdPath",
    "SsdStep",
    "add_skip",
    "initial_state",
    "k1_ssd_chunk_cumsum",
    "k2_ssd_bmm",
    "k3_ssd_chunk_state",
    "k4_ssd_state_passing",
    "k5_ssd_chunk_scan",
    "ssd",
    "ssd_core",
    "ssd_step",
]
