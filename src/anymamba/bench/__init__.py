"""Measurements: cases, clocks, memory and reports. Correctness is for the tests."""

from anymamba.bench.archive import (
    Sections,
    add_section,
    page,
    rates_line,
    read_sections,
    section,
)
from anymamba.bench.blocks import LARGE, SMALL, BlockCase, block_cases
from anymamba.bench.budget import Promise, promises
from anymamba.bench.case import GROUPS, MODES, Case, Way, backward
from anymamba.bench.clock import Timing, interleave, interleaved_medians
from anymamba.bench.decode import Decoding, decode_figures, random_model
from anymamba.bench.decode_budget import decode_promises
from anymamba.bench.growth import Growth, Threads, growth_figures, thread_figures
from anymamba.bench.llama import LlamaFiles, LlamaModel, has_llama, llama_files
from anymamba.bench.lms import PUBLISHED, lm_case
from anymamba.bench.machine import Machine, Rates, Work, describe_machine
from anymamba.bench.measure import Effort, Row, measure
from anymamba.bench.memory import intermediate_bytes, peak_bytes, tensor_bytes
from anymamba.bench.operators import conv_cases, core_cases, scan_cases
from anymamba.bench.peer_memory import PeerStep, peer_step
from anymamba.bench.plot import draw
from anymamba.bench.portable import CoreSizes, core_inputs, fastest_path
from anymamba.bench.profile import Profile, profile_block
from anymamba.bench.report import PlainTable, budget_table, tables
from anymamba.bench.results import Report
from anymamba.bench.scans import Figure, core_figures, scan_figures
from anymamba.bench.suite import Suite, run_suite, suite_cases
from anymamba.bench.token_limit import TokenLimit, stored_bytes, token_limit
from anymamba.bench.training_memory import TrainingMemory, memory_figures

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
    "LlamaFiles",
    "LlamaModel",
    "Machine",
    "PeerStep",
    "PlainTable",
    "Profile",
    "Promise",
    "Rates",
    "Report",
    "Row",
    "Sections",
    "Suite",
    "Threads",
    "Timing",
    "TokenLimit",
    "TrainingMemory",
    "Way",
    "Work",
    "add_section",
    "backward",
    "block_cases",
    "budget_table",
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
    "has_llama",
    "interleave",
    "interleaved_medians",
    "intermediate_bytes",
    "llama_files",
    "lm_case",
    "measure",
    "memory_figures",
    "page",
    "peak_bytes",
    "peer_step",
    "profile_block",
    "promises",
    "random_model",
    "rates_line",
    "read_sections",
    "run_suite",
    "scan_cases",
    "scan_figures",
    "section",
    "stored_bytes",
    "suite_cases",
    "tables",
    "tensor_bytes",
    "thread_figures",
    "token_limit",
]
