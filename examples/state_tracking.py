"""State tracking: which blocks can follow a running state beyond the training length.

    python examples/state_tracking.py                     the whole table, on all cores; resumable
    python examples/state_tracking.py --only parity       one column
    python examples/state_tracking.py --only "Mamba-2"    one row
    python examples/state_tracking.py --quick             a minute, to see it work

Repeats Table 5b of the Mamba-3 paper (arXiv 2603.15569): train on short sequences of parity and of
arithmetic modulo 5, test on length 256. Scores are percent of the way from guessing to perfect.
docs/evidence.md says where the setting differs from the paper's, and what came out.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import anymamba as am
from formal_languages import LANGUAGES, UNASKED, Batch, Language
from picture import draw_bars
from report import ranged, table
from standard_rotation import rotate_by_position
from state_tracking_cells import QUICK, ROWS, TASKS, Row, Size, row_of
from study import Study, flags, positive
from training import Run, Schedule, seeded, train

Results = dict[str, dict[str, list[dict[str, Any]]]]  # of each seed, by task and row

TEST_LENGTH = 256
SHORTER = (20, 40, 80, 160)  # lengths at which a finished model is looked at as well
SHORTEST = 3
SHORT, LONG = 40, 160  # longest sequence at the beginning and at the end of the training
TOKENS = 64 * SHORT  # in a batch
FALL = 1e-2  # of the learning rate, while the sequences grow and after
AGAIN = 0.25  # of the learning rate at the beginning, when it falls a second time
# An angle has to become exact, but the loss vanishes as soon as all answers are sure, and a model
# that is perfect at 160 may drift away before 256. The decay keeps weights that nothing asks for
# at zero, among them small turns at symbols that should not turn; averaging the weights of the last
# steps takes away what is left of the noise of single batches.
ADAM = {"betas": (0.9, 0.95), "weight_decay": 0.1}
TRIAL = 0.1  # share of the steps that a learning rate is tried for
SOLVED = 99.5
HOPELESS = 80.0  # on the shortest of SHORTER
WARM_UP = 100
ROWS_AT_ONCE = 128
TEST_DATA, TRAINING_DATA = 1, 2


def model_of(row: Row, size: Size, language: Language) -> am.MambaLM:
    """Build the small language model of a cell; the caller has set the seed."""
    config = am.MambaConfig(
        d_model=size.width,
        n_layer=size.layers,
        vocab_size=language.vocabulary + 1,
        pad_vocab_size_multiple=1,
        tie_embeddings=False,
        ssm_cfg=row.ssm_cfg,
    )
    model = am.MambaLM(config)
    if row.turns_by == "place":
        rotate_by_position(model)
    return model


def longest_at(step: int, steps: int, grows: tuple[float, float]) -> int:
    """Return the curriculum's longest sequence: short, growing evenly, long."""
    start, end = grows
    grown = min(max((step / steps - start) / (end - start), 0.0), 1.0)
    return SHORT + round(grown * (LONG - SHORT))


def after_start(batch: Batch, language: Language) -> Batch:
    """Put a start symbol in front of every row.

    The state is empty before the first symbol, and turning nothing tells nothing: without a start a
    block has to answer from whatever the first symbol happened to write.
    """
    start = torch.full((len(batch.tokens), 1), language.vocabulary)
    tokens = torch.cat([start, batch.tokens], 1)
    return Batch(tokens, torch.cat([torch.full_like(start, UNASKED), batch.answers], 1))


def loss_of(model: am.MambaLM, task: str, seed: int, step: int, steps: int) -> Tensor:
    """Return the loss on the batch of a step: rows of one length, drawn up to the longest."""
    language, generator = LANGUAGES[task], seeded(TRAINING_DATA, seed, step)
    place = float(torch.rand(1, generator=generator))
    length = SHORTEST + round(place * (longest_at(step, steps, TASKS[task].grows) - SHORTEST))
    batch = language.batch(TOKENS // length, length, generator, uneven=True)
    tokens, answers = after_start(batch, language)
    return F.cross_entropy(model(tokens).flatten(0, 1), answers.flatten(), ignore_index=UNASKED)


@torch.no_grad()
def score(
    model: am.MambaLM, language: Language, sequences: int, seed: int, length: int = TEST_LENGTH
) -> float:
    """Return the scaled accuracy of the last answer of sequences of the test length."""
    right = 0
    for first in range(0, sequences, ROWS_AT_ONCE):
        rows = min(ROWS_AT_ONCE, sequences - first)
        batch = language.batch(rows, length, seeded(TEST_DATA, seed, first))
        tokens, answers = after_start(batch, language)
        right += int((model(tokens)[:, -1].argmax(-1) == answers[:, -1]).sum())
    return language.scaled(right / sequences)


def learning_rate(peak: float, size: Size, falls: float) -> Callable[[int], float]:
    """Return a short warm-up, the peak for a share of the steps, then a fall by a constant factor.

    And all of it a second time, lower, if the training goes on behind the curriculum.

    The longer the sequences, the more exact an angle has to be: the error of one step adds up.
    """

    def rate(step: int) -> float:
        top, steps = peak, size.steps
        if step >= steps and size.again:
            top, step, steps = AGAIN * peak, step - steps, size.again
        fallen = max(0.0, (step / steps - falls) / (1 - falls))
        return top * min((step + 1) / WARM_UP, FALL**fallen)

    return rate


def is_over(measures: dict[str, float], task: str, steps: int) -> bool:
    """Say whether a training need not go on: all is learnt, or not even short sequences are."""
    is_hopeless = measures["step"] >= TASKS[task].gives_up * steps and measures["short"] < HOPELESS
    return measures["score"] >= SOLVED or is_hopeless


def train_cell(
    run: Run, task: str, row: Row, size: Size, seed: int, peak: float, stop_at: int
) -> dict[str, Any]:
    """Train one model and measure it; `stop_at` below the steps makes it a trial."""
    language = LANGUAGES[task]
    torch.manual_seed(seed)
    model = model_of(row, size, language)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(1 - 1 / TASKS[task].averaged))

    def average(step: int) -> None:
        if step > size.all_steps - (size.again or size.steps) / 2:
            mean.update_parameters(model)

    def judged() -> am.MambaLM:
        return cast("am.MambaLM", mean.module) if mean.n_averaged > 0 else model

    def look(_: int) -> dict[str, float]:
        lengths = {"score": TEST_LENGTH, "short": SHORTER[0]}
        return {
            name: score(judged(), language, size.tested // 8, seed=0, length=length)
            for name, length in lengths.items()
        }

    rate = learning_rate(peak, size, TASKS[task].falls)
    history = train(
        run,
        nn.ModuleList([model, mean]),
        torch.optim.AdamW(model.parameters(), **ADAM, fused=True),
        Schedule(stop_at, rate, max(20, size.steps // 20)),
        lambda step: loss_of(model, task, seed, step, size.steps),
        look,
        enough=lambda measures: is_over(measures, task, size.all_steps),
        before_step=average,
    )
    result = {
        "loss": round(history[-1]["loss"], 4),
        "steps": int(history[-1]["step"]),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    # A trial is judged by its loss, which tells rates apart long before the scores do.
    if stop_at == size.all_steps:
        result["score"] = round(score(judged(), language, size.tested, seed=1), 2)
        result["shorter"] = {
            str(length): round(score(judged(), language, size.tested // 4, 2, length), 2)
            for length in SHORTER
        }
    return result


def best_rate(study: Study, task: str, name: str, size: Size) -> float | None:
    """Return the learning rate with the lowest loss in its trial; None while trials are missing."""
    stop_at = max(1, int(TRIAL * size.steps))
    losses: dict[float, float] = {}
    for peak in TASKS[task].learning_rates:
        result = study.cell(
            f"{task} | {name} | trial of {peak:g}",
            setting_of(task, name, size, 0, peak, stop_at),
            lambda run, peak=peak: train_cell(
                run, task, row_of(name, task), size, 0, peak, stop_at
            ),
        )
        if result is not None:
            losses[peak] = result["loss"]
    is_complete = len(losses) == len(TASKS[task].learning_rates)
    return min(losses, key=lambda peak: losses[peak]) if is_complete else None


def setting_of(
    task: str, name: str, size: Size, seed: int, peak: float, stop_at: int
) -> dict[str, Any]:
    """Return all that decides a cell, but the code itself."""
    row = row_of(name, task)
    return {
        "task": task,
        "ssm_cfg": row.ssm_cfg,
        "turns_by": row.turns_by,
        "size": size._asdict(),
        "seed": seed,
        "learning_rate": peak,
        "warm_up": WARM_UP,
        "fall": FALL,
        "again": AGAIN,
        "adam": ADAM,
        "stop_at": stop_at,
        "solved": SOLVED,
        "lengths": [SHORTEST, SHORT, LONG, "even"],
        "grows": TASKS[task].grows,
        "falls": TASKS[task].falls,
        "averaged": TASKS[task].averaged,
        "gives_up": [TASKS[task].gives_up, HOPELESS],
        "test_length": TEST_LENGTH,
        "tokens": TOKENS,
    }


def results_of(
    study: Study, task: str, name: str, size: Size, seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the results of a row on a task, those that are there or may be computed now."""
    peak = best_rate(study, task, name, size)
    if peak is None:
        return []
    results = [
        study.cell(
            f"{task} | {name} | seed {seed}",
            setting_of(task, name, size, seed, peak, size.all_steps),
            lambda run, seed=seed, peak=peak: train_cell(
                run, task, row_of(name, task), size, seed, peak, size.all_steps
            ),
        )
        for seed in seeds
    ]
    return [result for result in results if result is not None]


def collect(study: Study) -> Results:
    """Ask for every cell; return the results that are there."""
    options = study.options
    seeds = range(options.seeds or (1 if options.quick else 3))
    results: Results = {}
    for task, column in TASKS.items():
        steps, again = (round(options.budget * n) for n in (column.size.steps, column.size.again))
        whole = column.size._replace(steps=max(1, steps), again=again)
        size = QUICK if options.quick else whole
        results[task] = {name: results_of(study, task, name, size, seeds) for name in ROWS}
    return results


def table_of(results: Results) -> str:
    """Return the table in Markdown: the mean over seeds, the range, and the paper's number."""
    rows = []
    for name, row in ROWS.items():
        entries = []
        for task, found in results.items():
            text = ranged([result["score"] for result in found[name]], count=True)
            entries.append(f"{text}; paper {row.paper[task]:.1f}" if row.paper else text)
        rows.append([name, *entries])
    return table(["model", *results], rows)


def table_by_length(task: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the sizes of a task's models, their trainings, and how they do at other lengths."""
    rows = []
    for name, every in found.items():
        if results := [r for r in every if "shorter" in r]:
            columns = [[r["shorter"][str(n)] for r in results] for n in SHORTER]
            columns.append([r["score"] for r in results])
            steps = ", ".join(str(r["steps"]) for r in results)
            rows.append([name, f"{results[0]['parameters']:,}", steps, *map(ranged, columns)])
    lengths = (f"length {n}" for n in (*SHORTER, TEST_LENGTH))
    return table([task, "parameters", "steps of each seed", *lengths], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute what is missing, print the table and draw it."""
    parser = flags(__doc__ or "")
    parser.add_argument("--seeds", type=positive, help="seeds per row and task (3; 1 with --quick)")
    study = Study("state_tracking", parser.parse_args(arguments))
    results = study.complete(collect)
    print(table_of(results))
    for task, found in results.items():
        if any("shorter" in result for every in found.values() for result in every):
            print(f"\n{table_by_length(task, found)}")
    print(study.time_spent())
    draw_bars(
        study.picture(),
        {
            task: {name: [r["score"] for r in found] for name, found in rows.items()}
            for task, rows in results.items()
        },
        dict.fromkeys(results, f"scaled accuracy at length {TEST_LENGTH}, %"),
        marks={
            task: {name: row.paper[task] for name, row in ROWS.items() if row.paper}
            for task in results
        },
        mark_name="the paper",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
