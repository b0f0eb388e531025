"""Can one layer follow the product of a word in a group, with complex and with quaternion turns?

    python examples/group_words.py            # 40 minutes on one core; --quick takes two
    python examples/group_words.py --only A5

Three settings. "512 words" is that of the original study: few words, no MLP; the early places can
be learnt by heart (512 words spell out nine generators), and the rest is chance. "fresh words"
draws its words anew each time and adds a gated MLP behind the block, because the readout needs
products (`group_models.py` says why, and has weights that are right at every depth). "Large steps"
begins with step sizes of 0.1 to 1: a turn is a step size times an angle, and with the default,
0.001 to 0.1, a model has learnt the words by heart before it turns. Models are trained to depth 12
and tested to depth 24: there are 4096 words of depth 12, few enough to learn by heart, so it is
beyond them that a model shows whether it has learnt the group.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.train import cosine_factor
from group_models import BLOCK, WIDTH, model_of
from groups import EVAL_SEED, GROUPS, REFERENCE, TRAIN_SEED, Group
from picture import draw_curves
from report import ranged, table
from study import Study, flags
from training import LARGE_STEPS, Run, Schedule, seeded, train

SEEDS = (0, 1, 2)
ROTATIONS = ("complex", "quaternion")
DEPTH, BATCH, WARMUP = 12, 64, 100
TEST_SEED = 0xE7A1


@dataclass(frozen=True)
class Setting:
    """How to train.

    Args:
        name: of the setting.
        groups: in which groups.
        words: how many words there are; 0 means a fresh one each time.
        has_mlp: whether a gated MLP follows the block.
        steps: updates.
        rate: learning rate at its peak.
        is_constant: whether it stays there; else it falls as a cosine.
        decay: of the weights.
        block: sizes of the block and what it begins with.
    """

    name: str
    groups: tuple[str, ...]
    words: int
    has_mlp: bool
    steps: int
    rate: float
    is_constant: bool
    decay: float
    block: dict[str, Any]


ALL = ("A5", "S3", "Q8")
ORIGINAL = Setting("512 words", ("A5",), 512, False, 120 * 8, 1e-3, True, 0.1, BLOCK)
FRESH = Setting("fresh words", ALL, 0, True, 4000, 3e-3, False, 0.0, BLOCK)
TURNING = Setting(
    "fresh words, large steps", ALL, 0, True, 2000, 3e-3, False, 0.0, BLOCK | LARGE_STEPS
)


SETTINGS = {setting.name: setting for setting in (ORIGINAL, FRESH, TURNING)}

Curves = dict[
    str, dict[str, dict[float, list[float]]]
]  # by panel, rotation and depth: of each seed


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the table, print it and draw it."""
    study = Study("group_words", flags(__doc__ or "").parse_args(arguments))
    curves, sizes = study.complete(collect)
    print(table_of(curves, sizes))
    print(study.time_spent())
    if curves:
        draw_curves(
            study.picture(),
            {name: {s: curves.get(f"{name}, {s}", {}) for s in SETTINGS} for name in ALL},
            ("generators so far", "right answers, %"),
            levels={name: 100 / len(GROUPS[name].elements) for name in ALL},
            level_name="guessing",
            border=DEPTH,
            border_name="longest words of the training",
        )
    return 0


def collect(study: Study) -> tuple[Curves, dict[tuple[str, str], int]]:
    """Ask for every cell; return the curves that are there, and the parameters of their models."""
    curves: Curves = {}
    sizes: dict[tuple[str, str], int] = {}
    is_quick = study.options.quick
    for seed in SEEDS[:1] if is_quick else SEEDS:  # everything once before anything twice
        for setting, name, rotation in cases():
            steps = 40 if is_quick else max(1, round(setting.steps * study.options.budget))
            result = study.cell(
                f"{name} | {setting.name} | {rotation} | seed {seed}",
                setting_of(setting, name, rotation, seed, steps),
                lambda run, how=(setting, GROUPS[name], rotation, seed, steps): learn(run, *how),
            )
            if result is not None:
                panel = f"{name}, {setting.name}"
                sizes[panel, rotation] = result["parameters"]
                curve = curves.setdefault(panel, {}).setdefault(rotation, {})
                for depth, value in enumerate(result["accuracy"]):
                    curve.setdefault(depth, []).append(value)
    return curves, sizes


def setting_of(
    setting: Setting, group: str, rotation: str, seed: int, steps: int
) -> dict[str, Any]:
    """Return all that decides a cell, but the code itself."""
    how = asdict(replace(setting, steps=steps))
    del how["groups"]
    sizes = {"depth": DEPTH, "batch": BATCH, "warm_up": WARMUP, "width": WIDTH}
    return {**how, "group": group, "rotation": rotation, "seed": seed, **sizes}


def cases() -> Iterator[tuple[Setting, str, str]]:
    """Yield setting, group and rotation of every curve."""
    for setting in SETTINGS.values():
        for name, rotation in itertools.product(setting.groups, ROTATIONS):
            yield setting, name, rotation


def learn(
    run: Run, setting: Setting, group: Group, rotation: str, seed: int, steps: int
) -> dict[str, Any]:
    """Train one model and test it at every depth."""
    torch.manual_seed(seed)
    model = model_of(group, rotation=rotation, has_mlp=setting.has_mlp, block=setting.block)
    known = group.words(setting.words, DEPTH, TRAIN_SEED)
    held_out = group.words(128, DEPTH, EVAL_SEED)

    def loss_at(step: int) -> Tensor:
        if setting.words:
            epoch, place = divmod(step * BATCH, setting.words)
            order = torch.randperm(setting.words, generator=seeded(seed, epoch))
            words = known[order[place : place + BATCH]]
        else:
            words = torch.randint(2, (BATCH, DEPTH + 1), generator=seeded(seed, step))
            words[:, 0] = REFERENCE
        return model.loss(one_hot(words), group.targets(words))

    def rate_at(step: int) -> float:
        if setting.is_constant:
            return setting.rate
        return setting.rate * cosine_factor(step + 1, steps, warmup=min(WARMUP, steps // 4))

    optimiser = torch.optim.AdamW(
        model.parameters(), lr=setting.rate, weight_decay=setting.decay, fused=True
    )
    train(
        run,
        model,
        optimiser,
        Schedule(steps, rate_at, evaluate_every=200),
        loss_at,
        lambda step: {f"right at depth {DEPTH}": accuracies(model, group, held_out)[-1]},
    )
    return {
        "accuracy": accuracies(model, group, group.words(1024, 2 * DEPTH, TEST_SEED)),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def one_hot(words: Tensor) -> Tensor:
    """Return words as vectors (words, length, 3)."""
    return F.one_hot(words, 3).float()


@torch.no_grad()
def accuracies(model: nn.Module, group: Group, words: Tensor) -> list[float]:
    """Return the share of right answers at each place, in percent."""
    right = model(one_hot(words)).argmax(-1) == group.targets(words)
    return (100 * right.double().mean(0)).tolist()


def table_of(curves: Curves, sizes: dict[tuple[str, str], int]) -> str:
    """Return the table in Markdown: right answers in percent at some depths, over seeds."""
    depths = (3, 6, 9, DEPTH, DEPTH + 4, 2 * DEPTH)
    heads = ["words", "rotation", "parameters", *(f"depth {depth}" for depth in depths)]
    rows = []
    for panel, rotations in curves.items():
        for rotation, points in rotations.items():
            lowest = min(value for seeds in points.values() for value in seeds)
            found = [ranged(points[depth]) for depth in depths]
            size = f"{sizes[panel, rotation]:,}"
            rows.append([panel, rotation, size, *found, f"{lowest:.1f}", str(len(points[0]))])
    return table([*heads, "lowest of all depths", "seeds"], rows)


if __name__ == "__main__":
    sys.exit(main())
