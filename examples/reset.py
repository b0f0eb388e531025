"""Do the smallest models learn the reset tasks, and do they fail without what a task needs?

    python examples/reset.py            # 30 minutes on one core; --quick takes one
    python examples/reset.py --only majority

Every model is one block of 62 to 328 parameters, trained on 4096 words of all families and tested
on 2048 of each from another seed. The ablations have the same schedule: the rotor without
rotation, the spinor with complex turns, which commute. The limits beside them are what tables can
reach that know only the symbol (majority), the symbol and its distance from the reset (rotor), or
how often each symbol came (spinor): see `reset_limits.py`.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.train import cosine_factor
from picture import COLOURS, new_figure, save
from report import table
from reset_limits import (
    LIMIT_SEED,
    TABLE_SEED,
    accuracy,
    counts_since_reset,
    steps_since_reset,
    symbol_alone,
    table_limit,
)
from reset_models import model_of
from reset_tasks import EVAL_SEED, MIXED, TASKS, TRAIN_SEED, Task, batch_of
from study import Study, flags
from training import Run, Schedule, seeded, train

# The landscape of 62 parameters has dead ends: more seeds say how often a run falls into one. Other
# runs rest at 92 % of the random words, all others right, and leave that plateau slowly.
SEEDS = {"reset-majority": range(8), "reset-rotor": range(3), "reset-spinor": range(3)}
EPOCHS = {"reset-majority": 160, "reset-rotor": 80, "reset-spinor": 80}
WORDS, BATCH, TESTED = 4096, 64, 2048
WARMUP, PEAK, FLOOR = 100, 3e-2, 1e-4
EPSILON, DECAY = 8.16e-8, 1e-4
# Every element of a gradient by itself, as in the original: by a norm one steep parameter would
# slow all others down.
LARGEST_GRADIENT = 1.0


@dataclass(frozen=True, eq=False)
class Contender:
    """A row of the table: a task, a name, and how the block differs from the task's own."""

    task: str
    name: str
    options: dict[str, Any]


Scores = dict[int, dict[str, float]]  # accuracy by seed and family

CONTENDERS = (
    Contender("reset-majority", "Mamba-2", {}),
    Contender("reset-rotor", "Mamba-3, complex", {}),
    Contender("reset-spinor", "Mamba-3, quaternion", {}),
    Contender("reset-rotor", "Mamba-3, no rotation", {"rope_fraction": 0.0}),
    Contender("reset-spinor", "Mamba-3, complex", {"rotation": "complex"}),
)
LIMITS = {
    "reset-majority": ("table of symbols", symbol_alone),
    "reset-rotor": ("table of steps since R", steps_since_reset),
    "reset-spinor": ("table of counts since R", counts_since_reset),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the table, draw it and print it."""
    study = Study("reset", flags(__doc__ or "").parse_args(arguments))
    scores = study.complete(collect)
    print(table_of(scores))
    print(study.time_spent())
    draw(study, scores)
    return 0


def collect(study: Study) -> dict[Contender, Scores]:
    """Ask for every cell; return the accuracies that are there."""
    scores: dict[Contender, Scores] = {}
    for contender in CONTENDERS:
        share = round(EPOCHS[contender.task] * study.options.budget)
        epochs = 4 if study.options.quick else max(1, share)
        for seed in SEEDS[contender.task][: 1 if study.options.quick else None]:
            setting = {
                "task": contender.task,
                "options": contender.options,
                "seed": seed,
                "epochs": epochs,
                "batch": BATCH,
                "words": [WORDS, TESTED],
                "rate": {"warm_up": WARMUP, "peak": PEAK, "floor": FLOOR},
                "adam": {"eps": EPSILON, "weight_decay": DECAY},
                "largest_gradient": LARGEST_GRADIENT,
            }
            result = study.cell(
                f"{contender.task} | {contender.name} | seed {seed}",
                setting,
                lambda run, how=(contender, seed, epochs): learn(run, *how),
            )
            if result is not None:
                scores.setdefault(contender, {})[seed] = result["test"]
    return scores


def learn(run: Run, contender: Contender, seed: int, epochs: int) -> dict[str, Any]:
    """Train one model and test it on other words."""
    task = TASKS[contender.task]
    torch.manual_seed(seed)
    model = model_of(task.name, **contender.options)
    x, targets = batch_of(task, task.words(MIXED, WORDS, TRAIN_SEED))
    held_out = batches_by_family(task, 512, EVAL_SEED)
    per_epoch, steps = WORDS // BATCH, epochs * (WORDS // BATCH)

    def loss_at(step: int) -> Tensor:
        order = torch.randperm(WORDS, generator=seeded(seed, step // per_epoch))
        rows = order[step % per_epoch * BATCH :][:BATCH]
        return model.loss(x[rows], targets[rows])

    for parameter in model.parameters():
        parameter.register_hook(
            lambda gradient: gradient.clamp(-LARGEST_GRADIENT, LARGEST_GRADIENT)
        )
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=PEAK, eps=EPSILON, weight_decay=DECAY, fused=True
    )
    schedule = Schedule(
        steps, lambda step: learning_rate(step, steps), 5 * per_epoch, clip=math.inf
    )
    train(run, model, optimiser, schedule, loss_at, lambda step: accuracies(model, held_out))
    return {
        "test": accuracies(model, batches_by_family(task, TESTED, LIMIT_SEED)),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def batches_by_family(task: Task, count: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return words of each family with their targets."""
    return {name: batch_of(task, task.words(name, count, seed)) for name in task.families}


@torch.no_grad()
def accuracies(model: nn.Module, batches: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the accuracy of each family in percent."""
    return {name: accuracy(model(x), targets) for name, (x, targets) in batches.items()}


def learning_rate(step: int, steps: int) -> float:
    """Return a warm-up to the peak and half a cosine to the floor."""
    return PEAK * cosine_factor(step + 1, steps, warmup=WARMUP, floor=FLOOR / PEAK)


def limits(task: Task) -> dict[str, float]:
    """Return what the task's table reaches on the test words of each family."""
    coder = LIMITS[task.name][1]
    return {
        name: table_limit(
            task, coder, task.words(name, TESTED, TABLE_SEED), task.words(name, TESTED, LIMIT_SEED)
        )
        for name in task.families
    }


def table_of(scores: dict[Contender, Scores]) -> str:
    """Return the table in Markdown: worst to best seed on each family, beside the limits."""
    rows = []
    for task in TASKS.values():
        for contender, runs in scores.items():
            if contender.task == task.name:
                ranges = [[run[family] for run in runs.values()] for family in task.families]
                cells = [
                    f"{name} {min(r):.3f} to {max(r):.3f}"
                    for name, r in zip(task.families, ranges, strict=True)
                ]
                solved = [seed for seed, run in runs.items() if min(run.values()) == 100]
                seeds = f"{len(solved)} of {len(runs)} seeds: {', '.join(map(str, solved)) or '-'}"
                rows.append([task.name, contender.name, ", ".join(cells), seeds])
        cells = [f"{name} {value:.3f}" for name, value in limits(task).items()]
        rows.append([task.name, LIMITS[task.name][0], ", ".join(cells), ""])
    heads = ["task", "who", "accuracy on its families, %", "all families at 100 %"]
    return table(heads, rows)


def draw(study: Study, scores: dict[Contender, Scores]) -> None:
    """Draw a panel per task: families, a bar per contender, a dot per seed, the limit as a line."""
    names = list(dict.fromkeys(contender.name for contender in CONTENDERS))
    figure = new_figure(10, 4.6)
    panels = figure.subplots(1, 3, sharey=True)
    for panel, task in zip(panels, TASKS.values(), strict=True):
        rows = {c: runs for c, runs in scores.items() if c.task == task.name}
        width = 0.8 / max(1, len(rows))
        for place, (contender, runs) in enumerate(rows.items()):
            centres = [group + (place + 0.5) * width - 0.4 for group in range(3)]
            means = [fmean(run[family] for run in runs.values()) for family in task.families]
            colour = COLOURS[names.index(contender.name)]
            panel.bar(centres, means, width * 0.92, label=contender.name, color=colour, alpha=0.6)
            for number, run in enumerate(runs.values()):
                # Side by side, because many seeds lie at 100 %.
                aside = width * 0.8 * ((number + 0.5) / len(runs) - 0.5)
                dots = [centre + aside for centre in centres]
                label = "a seed" if place == number == 0 else None
                panel.plot(dots, list(run.values()), "k.", markersize=5, zorder=3, label=label)
        for group, value in enumerate(limits(task).values()):
            label = LIMITS[task.name][0] if group == 0 else None
            panel.hlines(value, group - 0.42, group + 0.42, "black", "dashed", label=label)
        panel.set_title(task.name)
        panel.set_xticks(range(3), list(task.families))
        panel.set_xlabel("family of words")
        panel.set_ylim(0, 104)
        panel.grid(axis="y", linewidth=0.3)
        panel.set_axisbelow(True)
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False)
    panels[0].set_ylabel("accuracy on test words, %")
    save(figure, study.picture())


if __name__ == "__main__":
    sys.exit(main())
