"""What a training step of a whole model holds at once, with and without recomputing its layers."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.bench.lms import THEIR_LONGEST, prompt_ids, training_step
from anymamba.bench.memory import peak_and_result
from anymamba.bench.peers import their_lm
from anymamba.models import MambaConfig, MambaLM, preset, recompute_layers
from anymamba.nn import Mamba

__all__ = ["TrainingMemory", "memory_figures"]

# Longer than this a peer is not waited for, and more than this share of the memory it may not take.
MOST_SECONDS = 60.0
MOST_SHARE = 0.6
# Where the machine does not say how much memory is free.
USUAL_BYTES = 8 * 2**30
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
        seconds: of the step, with the profiler on.
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
        lengths: a short one, which tells whether a peer can do the other one too. Of Mamba-1 it is
            at most `THEIR_LONGEST`.
        configs: other models than the presets of these names.
        tell: is told what happens.
    """
    for name in models:
        config = (configs or {}).get(name) or preset(name)
        torch.manual_seed(0)
        lm = MambaLM(config)
        theirs = their_lm(lm)
        found: list[TrainingMemory] = []
        short = min(lengths[0], THEIR_LONGEST) if config.layer == "Mamba1" else lengths[0]
        for length in (short, lengths[1]):
            ids_bs = prompt_ids(length, config.vocab_size)
            loss: float | None = None
            for way in WAYS[: 2 if length == short else 4]:
                tell(f"memory of {name}, {length} tokens, {way}")
                why_not = theirs if isinstance(theirs, str) else _hopeless(found, way, length, lm)
                if way in THEIRS and why_not:
                    found.append(TrainingMemory(name, length, way, None, 0.0, 0.0, why_not))
                else:
                    peak, seconds, value = _measure(_step(lm, theirs, way, ids_bs))
                    loss = value if loss is None else loss
                    error = abs(value - loss) / abs(loss)
                    found.append(TrainingMemory(name, length, way, peak, seconds, error))
                yield found[-1]


def _step(lm: MambaLM, theirs: Any, way: str, ids_bs: Tensor) -> Callable[[], Sequence[Tensor]]:
    if way == "anymamba":
        return training_step(lm, lambda: lm.loss(ids_bs))
    if way == "anymamba, recomputing":
        again = copy.deepcopy(lm)
        recompute_layers(again)
        return training_step(again, lambda: again.loss(ids_bs))
    # It recomputes in training mode only, which changes nothing else in these models.
    recomputes = way == "transformers, recomputing"
    if recomputes:
        theirs.gradient_checkpointing_enable({"use_reentrant": False})
    theirs.train(recomputes)
    return training_step(theirs, lambda: theirs(ids_bs, labels=ids_bs).loss)


def _measure(run: Callable[[], Sequence[Tensor]]) -> tuple[int, float, float]:
    """Return peak, seconds and loss of one step."""
    start = time.perf_counter()
    peak, results = peak_and_result(run)
    return peak, time.perf_counter() - start, float(results[0])


def _hopeless(found: Sequence[TrainingMemory], way: str, length: int, lm: MambaLM) -> str:
    """Return why a peer is not tried at this length, or nothing."""
    plain = [x for x in found if x.way == "transformers" and x.peak is not None]
    if way not in THEIRS or not plain:
        return ""
    short = plain[0]
    times = length / short.length
    mixer: Any = next(iter(lm.backbone.layers)).mixer  # pyright: ignore[reportArgumentType]
    # The backward of its Mamba-1 is quadratic: every token's slice has a gradient of full length.
    seconds = short.seconds * times * (times if isinstance(mixer, Mamba) else 1.0)
    if seconds > MOST_SECONDS:
        return f"one step of {length} tokens would take {seconds / 60:.0f} minutes"
    needed, free = (short.peak or 0) * times, _free_bytes()
    if way == "transformers" and needed > MOST_SHARE * free:
        return f"would need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    return ""


def _free_bytes() -> float:
    table = Path("/proc/meminfo")
    if table.is_file():
        for line in table.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return USUAL_BYTES
