"""The selective scan of Mamba-1 (mathematics: README.md)."""

from anymamba.ops.selective_scan.api import ScanOutput, selective_scan
from anymamba.ops.selective_scan.reference import selective_scan_reference
from anymamba.ops.selective_scan.step import ScanStep, selective_scan_step

__all__ = [
    "ScanOutput",
    "ScanStep",
    "selective_scan",
    "selective_scan_reference",
    "selective_scan_step",
]
