"""Print what narrow weights cost: logits of the golden models, perplexity of a trained one.

    python -m anymamba demo                              # trains a model, two minutes
    python tools/measure_quantization.py demo-run

The argument is the folder of a demo or of any other run of `anymamba train`; the text is what that
run held out, read in pieces of `--length` tokens from the empty state. Every format is measured as
it runs: token by token through the decoder, so that the rounding of activations counts too.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from anymamba.io import load_pretrained
from anymamba.models import MambaLM
from anymamba.train import RunFolder, prepare_data

GOLDENS = Path(__file__).parent.parent / "tests" / "goldens" / "lm"
# The largest change of perplexity that is promised.
PROMISED = {"bfloat16": 0.005, "float16": 0.005, "int8": 0.005, "int4": 0.03}
FORMATS = ("float32", "bfloat16", "float16", "int8", "int4")


class Reading(NamedTuple):
    """What a model makes of a text: its mean loss, and all logits."""

    loss: float
    logits_bsw: Tensor


def load_as(form: str, folder: Path, activation: str | None = None) -> MambaLM:
    """Load a model with its weights in a format."""
    is_integer = form.startswith("int")
    return load_pretrained(
        folder,
        dtype=torch.float32 if is_integer else getattr(torch, form),
        quantize=form if is_integer else None,
        a_activation=activation,
    )


@torch.inference_mode()
def read(lm: MambaLM, ids_bs: Tensor) -> Reading:
    """Read rows of ids through the decoder, which must be there."""
    cache, logits = lm.empty_cache(ids_bs.shape[0]), []
    for ids_b in ids_bs.T:
        logits.append(lm.step_(ids_b.contiguous(), cache, impl="native").float())
    logits_bsw = torch.stack(logits, 1)
    loss = F.cross_entropy(logits_bsw[:, :-1].flatten(0, 1), ids_bs[:, 1:].flatten())
    return Reading(float(loss), logits_bsw)


def error_of(expected: Tensor, actual: Tensor) -> float:
    """Return the norm of the difference over the norm of what was expected."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def golden_models() -> Iterator[tuple[str, Path, str | None]]:
    """List the golden models that the decoder serves: name, folder, activation of A."""
    for entry in json.loads((GOLDENS / "index.json").read_text()):
        folder = GOLDENS / entry["name"]
        if not json.loads((folder / "config.json").read_text())["attn_layer_idx"]:
            yield entry["name"].removeprefix("lm_"), folder, entry["a_activation"] or None


def print_goldens() -> None:
    """Print the error of all logits, against those of the official implementation in float64."""
    print("golden models, error of the logits", *(f"{form:>9}" for form in FORMATS))
    for name, folder, activation in golden_models():
        golden = load_file(folder / "golden.safetensors")
        errors = []
        for form in FORMATS:
            lm = load_as(form, folder, activation)
            errors.append(error_of(golden["logits"], read(lm, golden["input_ids"]).logits_bsw))
        print(f"  {name:32}", *(f"{error:9.1e}" for error in errors))


def held_out(run: RunFolder, length: int, most: int) -> Tensor:
    """Return the text that a run held out, in rows of equal length."""
    recipe = run.saved_recipe()
    data = prepare_data(recipe.data, recipe.data.cache_dir or run.tokens)
    try:
        if data.valid is None:
            raise SystemExit(
                f"{run.folder} holds no text out: set data.valid_share and train again"
            )
        ids = torch.cat([ids_s for ids_s, _ in data.valid.pieces()])
    finally:
        data.close()
    rows = min(len(ids) // length, most)
    if rows == 0:
        raise SystemExit(f"{run.folder} holds out {len(ids)} tokens; at least {length} are needed")
    return ids[: rows * length].view(rows, length).long()


def print_perplexity(run: RunFolder, ids_bs: Tensor) -> bool:
    """Print the perplexity of each format; say whether every promise is kept."""
    print(f"\ntrained model, {ids_bs.numel():,} tokens it has not seen")
    print("  format    perplexity    change   promised   error of the logits   likeliest the same")
    plain, kept = None, True
    for form in FORMATS:
        found = read(load_as(form, run.model), ids_bs)
        plain = plain or found
        change = math.exp(found.loss - plain.loss) - 1
        promise = PROMISED.get(form, 0.0)
        kept = kept and change <= promise
        same = found.logits_bsw.argmax(-1) == plain.logits_bsw.argmax(-1)
        print(
            f"  {form:9} {math.exp(found.loss):10.4f}  {change:+8.3%}   {promise:8.1%}   "
            f"{error_of(plain.logits_bsw, found.logits_bsw):19.1e}   {same.float().mean():18.1%}"
        )
    return kept


def main() -> int:
    """Measure and print; 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--pieces", type=int, default=32)
    given = parser.parse_args()
    run = RunFolder(given.run)
    if not run.model.is_dir():
        raise SystemExit(f"{given.run} must hold a finished run; make one with: anymamba demo")
    print_goldens()
    return 0 if print_perplexity(run, held_out(run, given.length, given.pieces)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
