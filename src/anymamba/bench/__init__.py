"""Measurements: clocks, memory and the cases they are applied to. Correctness is for the tests."""

from anymamba.bench.clock import interleaved_medians
from anymamba.bench.memory import intermediate_bytes, peak_bytes, tensor_bytes
from anymamba.bench.scans import Figure, core_figures, core_inputs, scan_figures, scan_growth

__all__ = [
    "Figure",
    "core_figures",
    "core_inputs",
    "interleaved_medians",
    "intermediate_bytes",
    "peak_bytes",
    "scan_figures",
    "scan_growth",
    "tensor_bytes",
]
