"""A trained model beside the strongest model that only counts, on the same held-out files.

The Witten-Bell n-gram model is fitted to exactly the bytes that the run has read, each once, and
both are asked for every byte of the held-out files and for their ends.
"""

from typing import NamedTuple

from anymamba.errors import ConfigError
from anymamba.io import ByteTokenizer, load_pretrained
from anymamba.train.batches import training_batches, validation_batches
from anymamba.train.data import TrainingData
from anymamba.train.evaluate import evaluate
from anymamba.train.metrics import read_metrics
from anymamba.train.ngram import WittenBell
from anymamba.train.recipe_sections import Recipe
from anymamba.train.run_folder import RunFolder
from anymamba.train.spans import Span

__all__ = ["Comparison", "compare_run"]

WHERE = "compare_run"


class Comparison(NamedTuple):
    """Bits per byte of both models, lower is better, and on what they were measured."""

    model: float
    ngram: float
    order: int
    seen_bytes: int
    held_out_bytes: int
    held_out_files: int

    @property
    def model_wins(self) -> bool:
        """Whether the trained model needs fewer bits."""
        return self.model < self.ngram


def compare_run(folder: RunFolder, *, order: int = 5) -> Comparison:
    """Compare the model of a finished run with an n-gram model of the bytes it was trained on.

    Args:
        folder: the run; its sources must be as they were.
        order: of the n-gram model: bytes of context, and the one predicted.

    Raises:
        ConfigError: there is no run, it is not finished or not one of bytes, or it holds nothing
            out.
        CheckpointError: the run has no whole checkpoint, or its sources have changed.
    """
    recipe = folder.saved_recipe()
    found = folder.checkpoints(recipe.loop.keep).newest()
    if found is None or not _is_finished(folder, found.step):
        raise ConfigError(
            f"{WHERE}: {str(folder.folder)!r} must hold a finished run; it is not finished. "
            "Go on with: anymamba train --resume"
        )
    data = folder.prepare_data(recipe.data)
    try:
        _check(data)
        batches = training_batches(data.train, recipe.data)
        batches.load_state_dict(found.facts["data"])
        spans = batches.seen_spans()
        ngram = WittenBell(order).fit(data.train.pieces(spans))
        return _compared(folder, recipe, data, ngram, spans)
    finally:
        data.close()


def _is_finished(folder: RunFolder, step: int) -> bool:
    """Whether model and checkpoint are of one moment: the end of the run, and nothing after it."""
    last = (read_metrics(folder.metrics) or [{}])[-1]
    ended = last.get("kind") == "end" and last["finished"] and last["step"] == step
    return ended and folder.model.is_dir()


def _compared(
    folder: RunFolder, recipe: Recipe, data: TrainingData, ngram: WittenBell, spans: list[Span]
) -> Comparison:
    assert data.valid is not None
    held_out = int(data.valid.bytes_q.sum())
    lm = load_pretrained(folder.model, device=recipe.loop.device)
    found = evaluate(lm, validation_batches(data.valid, recipe.data), recipe.loop)
    return Comparison(
        model=found.bits_per_byte,
        ngram=ngram.bits(data.valid.pieces()) / held_out,
        order=ngram.order,
        seen_bytes=round(sum(map(data.train.bytes_of, spans))),
        held_out_bytes=held_out,
        held_out_files=len(data.valid),
    )


def _check(data: TrainingData) -> None:
    if not isinstance(data.tokenizer, ByteTokenizer):
        raise ConfigError(
            f"{WHERE}: the run must have been one of bytes, because the n-gram model counts bytes; "
            f"got {data.tokenizer!r}."
        )
    if data.valid is None:
        raise ConfigError(
            f"{WHERE}: the run must hold text out; it was trained with data.valid_share=0."
        )
