"""What a training step of a whole model holds at once, with and without recomputing its layers."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from anymamba.bench.lms import prompt_ids, training_step
from anymamba.bench.machine import free_bytes
from anymamba.bench.peer_memory import PeerStep, StepMemory, measure_step, peer_step
from anymamba.bench.peers import why_no_peer
from anymamba.models import MambaConfig, MambaLM, preset, recompute_layers

__all__ = ["TrainingMemory", "memory_figures"]

# Longer than this a peer is not waited for, and more than this share of the memory it may not take.
MOST_SECONDS = 60.0
MOST_SHARE = 0.8
# Losses of the same tokens: rounding, through a stack of layers.
TOLERANCE = 1e-4
WAYS = ("anymamba", "transformers", "anymamba, recomputing", "transformers, recomputing")
THEIRS = WAYS[1::2]


class TrainingMemory(NamedTuple):
    """The peak of one training step.

    Attributes:
        model: name of the preset.
        length: tokens of the one sequence.
        way: who computes it.
        peak: most bytes at once, gradients included, weights not; None when it was not run.
        seconds: of the step; ours with the profiler on.
        error: of the loss, against the first way's; 0 for that one.
        why_not: why it was not run.
    """

    model: str
    length: int
    way: str
    peak: int | None
    seconds: float
    error: float
    why_not: str = ""

    @property
    def ok(self) -> bool:
        """Whether the loss is the same; else the memory means nothing."""
        return self.error <= TOLERANCE


def memory_figures(
    models: Sequence[str],
    lengths: tuple[int, int] = (256, 2048),
    *,
    configs: dict[str, MambaConfig] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[TrainingMemory]:
    """Measure training steps in float32; each figure comes when it is ready.

    Args:
        models: names of presets.
        lengths: a short one, which a peer can do, and another one.
        configs: other models than the presets of these names.
        tell: is told what happens.
    """
    for name in models:
        config = (configs or {}).get(name) or preset(name)
        torch.manual_seed(0)
        lm = MambaLM(config)
        for length in lengths:
            loss: float | None = None
            for way in WAYS[: 2 if length == lengths[0] else 4]:
                tell(f"memory of {name}, {length} tokens, {way}")
                found = _theirs(lm, way, length) if way in THEIRS else _ours(lm, way, length)
                if isinstance(found, str):
                    yield TrainingMemory(name, length, way, None, 0.0, 0.0, found)
                    continue
                loss = found.loss if loss is None else loss
                error = abs(found.loss - loss) / abs(loss)
                yield TrainingMemory(name, length, way, found.peak, found.seconds, error)


def _ours(lm: MambaLM, way: str, length: int) -> StepMemory:
    ids_bs = prompt_ids(length, lm.config.vocab_size)
    model = lm
    if way == "anymamba, recomputing":
        model = copy.deepcopy(lm)
        recompute_layers(model)
    return measure_step(training_step(model, lambda: model.loss(ids_bs)))


def _theirs(lm: MambaLM, way: str, length: int) -> StepMemory | str:
    if why_not := why_no_peer(lm):
        return why_not
    limit = int(MOST_SHARE * free_bytes())
    recomputes = way == "transformers, recomputing"
    step = PeerStep(lm.config, length, recomputes, limit, torch.get_num_threads())
    return peer_step(step, MOST_SECONDS)
