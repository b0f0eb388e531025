"""The cases of whole models: a training step of the published sizes, with random weights."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.bench.blocks import best_path
from anymamba.bench.case import JUDGE, Case, Way, Ways, portable
from anymamba.bench.machine import Work
from anymamba.bench.peers import their_lm
from anymamba.bench.portable import path_note
from anymamba.models import MambaConfig, MambaLM, count_model, preset
from anymamba.ops import SsdPath

__all__ = ["PUBLISHED", "lm_cases"]

PUBLISHED = ("mamba-130m", "mamba2-130m", "mamba3-siso-187m", "mamba3-mimo-187m")
GATE = 12


def lm_cases(name: str, length: int, config: MambaConfig | None = None) -> list[Case]:
    """Return the training step of a model: loss, and the gradient of every weight, in float32.

    The optimiser is left out: it would be the same one on both sides.

    Args:
        name: of a preset.
        length: tokens of the one sequence.
        config: another model than the preset of that name.
    """
    config = config or preset(name)
    flops = count_model(MambaLM(config, device="meta"), length=length).flops

    def prepare() -> Callable[[int], Ways]:
        torch.manual_seed(0)
        lm = MambaLM(config)
        theirs = their_lm(lm)
        layers: list[Any] = list(lm.backbone.layers)
        path = best_path(layers[0].mixer, 1, length, "train")
        return lambda length: _ways(lm, theirs, path, _ids(length, config.vocab_size))

    return [
        Case(
            group="train",
            name=f"{name} b1 s{length}",
            mode="train",
            dtype=torch.float32,
            tokens=length,
            work=Work(flops=3.0 * flops * length),
            length=length,
            gate_length=min(length, GATE),
            prepare=prepare,
        )
    ]


def _ids(length: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(1))


def _ways(lm: MambaLM, theirs: nn.Module | str, path: SsdPath | None, ids_bs: Tensor) -> Ways:
    def ours(impl: str, path: SsdPath | None = None) -> Callable[[], Sequence[Tensor]]:
        return _step(lm, lambda: lm.loss(ids_bs, impl=impl, path=path))

    ways: Ways = {
        "native": Way(ours("native"), slow=True),
        "portable": portable(ours("portable", path), path_note(path), slow=True),
        "transformers": theirs if isinstance(theirs, str) else "",
        JUDGE: portable(ours("reference")),
    }
    if isinstance(theirs, nn.Module):
        peer: Any = theirs
        run = _step(peer, lambda: peer(ids_bs, labels=ids_bs).loss)
        ways["transformers"] = Way(run, slow=True)
    return ways


def _step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], Sequence[Tensor]]:
    named = {
        name.replace(".embeddings.", ".embedding."): weight
        for name, weight in model.named_parameters()
    }
    weights = [named[name] for name in sorted(named)]

    def run() -> Sequence[Tensor]:
        value = loss()
        return [value.detach(), *torch.autograd.grad(value, weights)]

    return run
