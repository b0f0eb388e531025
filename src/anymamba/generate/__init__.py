"""Generation: token ids in, token ids out. Text belongs to `anymamba.io`."""

from anymamba.generate.engine import GenerateOutput, generate, generate_detailed
from anymamba.generate.sampling import (
    SamplingConfig,
    draw,
    keep_above,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_counts,
    penalize_repetition,
    restrict,
    row_seed,
    uniform,
)
from anymamba.generate.streaming import Stream, stream

__all__ = [
    "GenerateOutput",
    "SamplingConfig",
    "Stream",
    "draw",
    "generate",
    "generate_detailed",
    "keep_above",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "penalize_counts",
    "penalize_repetition",
    "restrict",
    "row_seed",
    "stream",
    "uniform",
]
