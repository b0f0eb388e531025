"""Print what integer weights cost: perplexity and logits of a model in each format.

    python tools/measure_quantization.py MODEL TEXT [--tokenizer FILE]

MODEL is a folder or a name on the hub, TEXT a file that the model has not been trained on. The text
is read in pieces of `--length` tokens from the empty state.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from anymamba.io import ByteTokenizer, load_pretrained, load_tokenizer
from anymamba.models import MambaLM

FORMATS = (None, "int8", "int4")


def pieces_of(ids: list[int], length: int, most: int) -> Tensor:
    """Cut ids into rows of equal length; what is left over is not used."""
    rows = min(len(ids) // length, most)
    if rows == 0:
        raise SystemExit(f"the text has {len(ids)} tokens; at least {length} are needed")
    return torch.tensor(ids[: rows * length]).view(rows, length)


@torch.inference_mode()
def losses_and_logits(lm: MambaLM, rows_bs: Tensor) -> tuple[float, Tensor]:
    """Return the mean loss of all rows, and the last logits of each."""
    losses, logits = [], []
    for row_s in rows_bs:
        losses.append(float(lm.loss(row_s[None])))
        logits.append(lm(row_s[None], num_last_tokens=1)[0, -1].float())
    return sum(losses) / len(losses), torch.stack(logits)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--tokenizer")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--pieces", type=int, default=16)
    given = parser.parse_args()
    tokenizer = ByteTokenizer() if given.tokenizer is None else load_tokenizer(given.tokenizer)
    ids = tokenizer.encode(Path(given.text).read_text())
    rows_bs = pieces_of(ids, given.length, given.pieces)
    plain, reference = 0.0, torch.empty(0)
    print(f"{rows_bs.numel()} tokens\nformat   perplexity    change   error of the logits")
    for scheme in FORMATS:
        loss, logits = losses_and_logits(load_pretrained(given.model, quantize=scheme), rows_bs)
        if scheme is None:
            plain, reference = loss, logits
        change = math.exp(loss - plain) - 1
        error = float((logits - reference).norm() / reference.norm())
        print(f"{scheme or 'float32':8} {math.exp(loss):10.4f}  {change:+8.2%}   {error:.2e}")


if __name__ == "__main__":
    main()
