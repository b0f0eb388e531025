"""Mamba-1, 2, 3 and 3 MIMO of equal size on the same text: bits per byte, speed, memory.

    python examples/language_models.py --only seed    # train: 25 minutes of one core
    python examples/language_models.py --only cost    # speed and memory: a minute, idle machine
    python examples/language_models.py --quick        # all of it in small: two minutes

The text is Python's standard library as bytes. Every model has half a million parameters, within
1.2 % of one another, sees the same windows in the same order, and takes the best of three learning
rates, chosen on a fifth of the steps. The 5-gram has counted exactly the bytes they have read.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import anymamba as am
from anymamba.bench import peak_bytes
from anymamba.train import Recipe, Trainer, compare_run, load_recipe
from picture import draw_bars
from report import ranged, table
from study import Study, flags
from training import LARGE_STEPS, Run

SEEDS = (0, 1, 2)
RATES = (2e-3, 4e-3, 8e-3)
STEPS, QUICK_STEPS = 400, 20
WINDOW, ROWS = 256, 4
LAYERS, HELD_OUT = 4, 0.005
COLUMNS = (
    *("model", "bits per byte", "parameters", "trained tokens/s", "decoded tokens/s"),
    *("peak of a training step", "state"),
)
DECODED, ROUNDS = 64, 9  # tokens per timed stretch of decoding, and repetitions

# The state size of Mamba-3 and the width of MIMO make up for what rotation and ranks add.
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Mamba-1": ("Mamba1", 128, {"d_state": 16}),
    "Mamba-2": ("Mamba2", 128, {"d_state": 64, "headdim": 32}),
    "Mamba-3 SISO": ("Mamba3", 128, {"d_state": 52, "headdim": 32}),
    # In so short a training it matters how far a block turns at first.
    "Mamba-3 SISO, large steps": ("Mamba3", 128, {"d_state": 52, "headdim": 32, **LARGE_STEPS}),
    "Mamba-3 MIMO": (
        "Mamba3",
        96,
        {"d_state": 72, "headdim": 32, "is_mimo": True, "mimo_rank": 4},
    ),
}


Bits = dict[str, list[float]]  # per byte, of each seed, by model


def main(arguments: Sequence[str] | None = None) -> int:
    """Choose the rates, train, measure, print and draw."""
    study = Study("language_models", flags(__doc__ or "").parse_args(arguments))
    bits, counted, costs = study.complete(collect)
    print(table_of(bits, counted, costs))
    print(study.time_spent())
    if all(bits.values()) and costs is not None:
        draw(study, bits, counted, costs)
    return 0


def collect(study: Study) -> tuple[Bits, list[float], dict[str, Any] | None]:
    """Ask for every cell; return what is there: of the models, of the 5-gram, and the costs."""
    is_quick = study.options.quick
    steps = QUICK_STEPS if is_quick else max(10, round(STEPS * study.options.budget))
    bits: Bits = {name: [] for name in MODELS}
    counted: dict[int, float] = {}
    for seed in SEEDS[:1] if is_quick else SEEDS:
        for name in MODELS:
            rate = chosen_rate(study, name, steps)
            result = None if rate is None else trained(study, name, rate, seed, steps)
            if result is not None:
                bits[name].append(result["bits_per_byte"])
                counted[seed] = result["five_gram"]
    costs = study.cell("cost", cost_setting(), lambda run: measure_costs(), threads=None)
    return bits, list(counted.values()), costs


def chosen_rate(study: Study, name: str, steps: int) -> float | None:
    """Return the learning rate with the best bits per byte on a fifth of the steps."""
    short = max(10, steps // 5)
    tried = {rate: trained(study, name, rate, 0, short) for rate in RATES}
    found = {rate: result["bits_per_byte"] for rate, result in tried.items() if result is not None}
    return min(found, key=found.__getitem__) if len(found) == len(RATES) else None


def trained(study: Study, name: str, rate: float, seed: int, steps: int) -> dict[str, Any] | None:
    """Return how well one model does after training on the first windows of an order."""
    layer, width, options = MODELS[name]
    setting = {
        "block": {"layer": layer, **options},
        "sizes": {"d_model": width, "n_layer": LAYERS},
        "text": {"window": WINDOW, "rows": ROWS, "held_out": HELD_OUT},
        "steps": steps,
        "warm_up": warm_up(steps),
        "rate": rate,
        "seed": seed,
    }
    return study.cell(
        f"{name} | {steps} steps at {rate:g} | seed {seed}",
        setting,
        lambda run: learn(run, study, recipe_of(name, rate, seed, steps)),
    )


def warm_up(steps: int) -> int:
    """Return the steps in which the learning rate rises."""
    return min(50, steps // 4)


def cost_setting() -> dict[str, Any]:
    """Return what is timed."""
    sizes = {"window": WINDOW, "rows": ROWS, "decoded": DECODED, "rounds": ROUNDS}
    return {**sizes, "n_layer": LAYERS, "models": MODELS}


def recipe_of(name: str, rate: float, seed: int, steps: int) -> Recipe:
    """Return what to train; the order of the text is the same for all models of a seed."""
    layer, width, options = MODELS[name]
    recipe = load_recipe(
        None,
        [
            *(f"data.window={WINDOW}", f"data.batch={ROWS}", f"data.seed={seed}"),
            f"data.valid_share={HELD_OUT}",
            *(f"model.layer={layer}", f"model.d_model={width}", f"model.n_layer={LAYERS}"),
            *(f"optim.lr={rate}", f"schedule.warmup={warm_up(steps)}"),
            *(f"loop.steps={steps}", f"loop.seed={seed}", "loop.evaluate_every=0"),
            *("loop.checkpoint_every=50", "loop.sample_tokens=1", "loop.report_every=5"),
        ],
    )
    return replace(recipe, model=replace(recipe.model, ssm_cfg=options))


def learn(run: Run, study: Study, recipe: Recipe) -> dict[str, Any]:
    """Train in the cell's folder; an interrupted run goes on from it."""
    recipe = replace(
        recipe,
        data=replace(recipe.data, cache_dir=str(study.scratch / "tokens")),
        loop=replace(recipe.loop, out=str(run.folder)),
    )

    def watch(entry: Any) -> None:
        if entry["kind"] == "step":
            run.say(f"step {entry['step']}, loss {entry['loss']:.3f}")

    summary = Trainer(recipe, resume=run.folder.exists(), watch=watch).run()
    found = compare_run(summary.folder)
    return {
        "bits_per_byte": found.model,
        "five_gram": found.ngram,
        "bytes_read": found.seen_bytes,
        "held_out_bytes": found.held_out_bytes,
    }


def measure_costs() -> dict[str, Any]:
    """Time the models one after the other, again and again; the median counts."""
    models = {name: model_of(name) for name in MODELS}
    ids = torch.randint(257, (ROWS, WINDOW), generator=torch.Generator().manual_seed(0))
    training: dict[str, list[float]] = {name: [] for name in MODELS}
    decoding: dict[str, list[float]] = {name: [] for name in MODELS}
    for _ in range(ROUNDS):
        for name, lm in models.items():
            training[name].append(seconds_of(lambda lm=lm: train_step(lm, ids)))
            decoding[name].append(seconds_of(lambda lm=lm: decode(lm, ids[:1, 0])))
    return {
        "threads": torch.get_num_threads(),
        **{
            name: {
                "parameters": sum(weight.numel() for weight in lm.parameters()),
                "trained_tokens_per_second": ids.numel() / statistics.median(training[name]),
                "decoded_tokens_per_second": DECODED / statistics.median(decoding[name]),
                "training_peak_bytes": peak_bytes(lambda lm=lm: train_step(lm, ids)),
                "state_bytes": lm.empty_cache(1).nbytes,
            }
            for name, lm in models.items()
        },
    }


def model_of(name: str) -> am.MambaLM:
    """Return an untrained model."""
    torch.manual_seed(0)
    return am.MambaLM(recipe_of(name, RATES[0], 0, STEPS).model.config(vocab_size=257))


def train_step(lm: am.MambaLM, ids: torch.Tensor) -> None:
    """Run forward and backward; the optimiser costs the same for all."""
    lm.zero_grad()
    lm.loss(ids).backward()


@torch.no_grad()
def decode(lm: am.MambaLM, ids: torch.Tensor) -> None:
    """Generate greedily, one sequence."""
    am.generate(lm, [ids.tolist()], max_new_tokens=DECODED)


def seconds_of(function: Any) -> float:
    """Return how long a call took."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def table_of(
    bits: dict[str, list[float]], counted: list[float], costs: dict[str, Any] | None
) -> str:
    """Return the table in Markdown; `-` is what is not computed yet."""
    empty = ["-"] * len(COLUMNS[2:])
    rows = [
        [name, ranged(seeds, 3, count=True), *(cost_of(costs[name]) if costs else empty)]
        for name, seeds in bits.items()
    ]
    rows.append(["5-gram", ranged(counted, 3, count=True), *[""] * len(empty)])
    return table(COLUMNS, rows)


def cost_of(cost: dict[str, float]) -> list[str]:
    """Return the entries of size, speed and memory."""
    return [
        str(cost["parameters"]),
        f"{cost['trained_tokens_per_second']:.0f}",
        f"{cost['decoded_tokens_per_second']:.0f}",
        f"{cost['training_peak_bytes'] / 2**20:.1f} MiB",
        f"{cost['state_bytes'] / 2**10:.0f} KiB",
    ]


def draw(study: Study, bits: Bits, counted: list[float], costs: dict[str, Any]) -> None:
    """Draw quality, speed of training, memory of training and the state, side by side."""
    cost = {
        "training speed": ("1000 tokens/s", "trained_tokens_per_second", 1e3),
        "memory of a training step": ("peak, MiB", "training_peak_bytes", 2**20),
        "state": ("KiB of a sequence", "state_bytes", 2**10),
    }
    draw_bars(
        study.picture(),
        {
            "quality": bits,
            **{
                title: {name: [costs[name][key] / unit] for name in MODELS}
                for title, (_, key, unit) in cost.items()
            },
        },
        {"quality": "bits per byte, held out", **{title: c[0] for title, c in cost.items()}},
        lines={"quality": ("5-gram", counted)},
        without_zero=("quality",),
    )


if __name__ == "__main__":
    sys.exit(main())
