"""Measurements: cases, clocks, memory and reports. Correctness is for the tests."""

from anymamba.bench.blocks import LARGE, SMALL, BlockCase, block_cases
from anymamba.bench.budget import Promise, decode_promises, promises
from anymamba.bench.case import GROUPS, MODES, Case, Way, backward
from anymamba.bench.clock import Timing, interleave, interleaved_medians
from anymamba.bench.decode import (
    Decoding,
    TokenLimit,
    decode_figures,
    stored_bytes,
    token_limit,
)
from anymamba.bench.growth import Growth, Threads, growth_figures, thread_figures
from anymamba.bench.lms import PUBLISHED, lm_cases, prefill_cases
from anymamba.bench.machine import Machine, Rates, Work, describe_machine
from anymamba.bench.measure import Effort, Row, measure
from anymamba.bench.memory import intermediate_bytes, peak_bytes, tensor_bytes
from anymamba.bench.operators import conv_cases, core_cases, scan_cases
from anymamba.bench.plot import draw
from anymamba.bench.portable import CoreSizes, core_inputs, fastest_path
from anymamba.bench.profile import Profile, profile_block
from anymamba.bench.report import PlainTable, markdown, rates_line, tables
from anymamba.bench.scans import Figure, core_figures, scan_figures
from anymamba.bench.suite import Report, Suite, run_suite, suite_cases

__all__ = [
    "GROUPS",
    "LARGE",
    "MODES",
    "PUBLISHED",
    "SMALL",
    "BlockCase",
    "Case",
    "CoreSizes",
    "Decoding",
    "Effort",
    "Figure",
    "Growth",
    "Machine",
    "PlainTable",
    "Profile",
    "Promise",
    "Rates",
    "Report",
    "Row",
    "Suite",
    "Threads",
    "Timing",
    "TokenLimit",
    "Way",
    "Work",
    "backward",
    "block_cases",
    "conv_cases",
    "core_cases",
    "core_figures",
    "core_inputs",
    "decode_figures",
    "decode_promises",
    "describe_machine",
    "draw",
    "fastest_path",
    "growth_figures",
    "interleave",
    "interleaved_medians",
    "intermediate_bytes",
    "lm_cases",
    "markdown",
    "measure",
    "peak_bytes",
    "prefill_cases",
    "profile_block",
    "promises",
    "rates_line",
    "run_suite",
    "scan_cases",
    "scan_figures",
    "stored_bytes",
    "suite_cases",
    "tables",
    "tensor_bytes",
    "thread_figures",
    "token_limit",
]
