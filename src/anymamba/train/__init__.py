"""Training: data, optimisers, the loop, checkpoints, and what a person sees.

One process, or all that torchrun starts.
"""

from anymamba.train.batches import (
    Batch,
    CarriedBatches,
    PackedBatches,
    training_batches,
    validation_batches,
)
from anymamba.train.checkpoint import CheckpointFolder, Snapshot
from anymamba.train.compare import Comparison, compare_run
from anymamba.train.corpus import Corpus, Document, place_of
from anymamba.train.data import TrainingData, prepare_data
from anymamba.train.evaluate import Evaluation, evaluate, sample
from anymamba.train.guard import Guard
from anymamba.train.joining import agree_on_a_word
from anymamba.train.learner import Learner
from anymamba.train.loop import RunSummary, Trainer
from anymamba.train.metrics import MetricsFile, read_metrics
from anymamba.train.muon import Float32Muon, build_muon, orthogonalise, torch_muon_serves
from anymamba.train.ngram import WittenBell, byte_piece
from anymamba.train.optim import TrainOptimizer, build_optimizer
from anymamba.train.plan import describe_recipe, steps_within
from anymamba.train.rank_learner import part_of
from anymamba.train.ranks import Ranks, open_ranks
from anymamba.train.recipe import (
    DataRecipe,
    LoopRecipe,
    ModelRecipe,
    OptimRecipe,
    ParallelRecipe,
    Recipe,
    ScheduleRecipe,
    load_recipe,
    recipe_difference,
    recipe_to_toml,
)
from anymamba.train.report import draw_curves, leave_papers, write_report
from anymamba.train.run_folder import RunFolder
from anymamba.train.schedule import cosine_factor, schedule_factor, warmup_factor, wsd_factor
from anymamba.train.segments import Segment, SegmentPlan, segment_plan
from anymamba.train.shards import TokenStore, fingerprint_of, open_store, write_store
from anymamba.train.spans import Reader, Span, SpanQueue, SpanTable, merge_spans
from anymamba.train.speed import SpeedMeter, matmul_rate

__all__ = [
    "Batch",
    "CarriedBatches",
    "CheckpointFolder",
    "Comparison",
    "Corpus",
    "DataRecipe",
    "Document",
    "Evaluation",
    "Float32Muon",
    "Guard",
    "Learner",
    "LoopRecipe",
    "MetricsFile",
    "ModelRecipe",
    "OptimRecipe",
    "PackedBatches",
    "ParallelRecipe",
    "Ranks",
    "Reader",
    "Recipe",
    "RunFolder",
    "RunSummary",
    "ScheduleRecipe",
    "Segment",
    "SegmentPlan",
    "Snapshot",
    "Span",
    "SpanQueue",
    "SpanTable",
    "SpeedMeter",
    "TokenStore",
    "TrainOptimizer",
    "Trainer",
    "TrainingData",
    "WittenBell",
    "agree_on_a_word",
    "build_muon",
    "build_optimizer",
    "byte_piece",
    "compare_run",
    "cosine_factor",
    "describe_recipe",
    "draw_curves",
    "evaluate",
    "fingerprint_of",
    "leave_papers",
    "load_recipe",
    "matmul_rate",
    "merge_spans",
    "open_ranks",
    "open_store",
    "orthogonalise",
    "part_of",
    "place_of",
    "prepare_data",
    "read_metrics",
    "recipe_difference",
    "recipe_to_toml",
    "sample",
    "schedule_factor",
    "segment_plan",
    "steps_within",
    "torch_muon_serves",
    "training_batches",
    "validation_batches",
    "warmup_factor",
    "write_report",
    "write_store",
    "wsd_factor",
]
