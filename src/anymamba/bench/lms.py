"""The cases of whole models: prefill and training of the published sizes, random weights."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.bench.blocks import best_path
from anymamba.bench.case import JUDGE, Case, Way, Ways, portable, without
from anymamba.bench.machine import Work
from anymamba.bench.peers import THEIR_CHUNK, their_lm
from anymamba.bench.portable import path_note
from anymamba.models import MambaConfig, MambaLM, count_model, preset
from anymamba.nn import Mamba2
from anymamba.ops import SsdPath

__all__ = ["PUBLISHED", "lm_cases", "prefill_cases"]

PUBLISHED = ("mamba-130m", "mamba2-130m", "mamba3-siso-187m", "mamba3-mimo-187m")
GATE = 12
MOST_BYTES = 4e9


def lm_cases(name: str, length: int, config: MambaConfig | None = None) -> list[Case]:
    """Return the training step of a model: loss, and the gradient of every weight, in float32.

    The optimiser is left out: it would be the same one on both sides.

    Args:
        name: of a preset.
        length: tokens of the one sequence.
        config: another model than the preset of that name.
    """
    return [_case(name, length, config or preset(name), "train")]


def prefill_cases(name: str, length: int, config: MambaConfig | None = None) -> list[Case]:
    """Return the reading of a prompt, in float32: the state, and the logits of its last token.

    Args:
        name: of a preset.
        length: tokens of the prompt.
        config: another model than the preset of that name.
    """
    return [_case(name, length, config or preset(name), "forward")]


def _case(name: str, length: int, config: MambaConfig, mode: str) -> Case:
    trains = mode == "train"
    parts = count_model(MambaLM(config, device="meta"), length=length).parts
    head = sum(part.flops for part in parts if part.kind == "head")
    body = sum(part.flops for part in parts) - head
    flops = 3.0 * (body + head) * length if trains else float(body * length + head)

    def prepare() -> Callable[[int], Ways]:
        torch.manual_seed(0)
        lm = MambaLM(config)
        theirs = their_lm(lm)
        layers: list[Any] = list(lm.backbone.layers)
        path = best_path(layers[0].mixer, 1, length, mode)
        ways = _training if trains else _reading
        return lambda length: ways(lm, theirs, path, _ids(length, config.vocab_size))

    return Case(
        group="train" if trains else "prefill",
        name=f"{name} b1 s{length}",
        mode=mode,
        dtype=torch.float32,
        tokens=length,
        work=Work(flops=flops),
        length=length,
        gate_length=min(length, GATE),
        prepare=prepare,
    )


def _ids(length: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(1))


def _training(lm: MambaLM, theirs: nn.Module | str, path: SsdPath | None, ids_bs: Tensor) -> Ways:
    def ours(impl: str, path: SsdPath | None = None) -> Callable[[], Sequence[Tensor]]:
        return _step(lm, lambda: lm.loss(ids_bs, impl=impl, path=path))

    peer: Any = theirs
    run = _step(peer, lambda: peer(ids_bs, labels=ids_bs).loss) if _is_there(theirs) else None
    return _columns(ours, theirs, path, run)


def _reading(lm: MambaLM, theirs: nn.Module | str, path: SsdPath | None, ids_bs: Tensor) -> Ways:
    def ours(impl: str, path: SsdPath | None = None) -> Callable[[], Sequence[Tensor]]:
        return without(lambda: [lm.prefill(ids_bs, num_last_tokens=1, impl=impl, path=path).logits])

    theirs = _small_enough(theirs, lm, ids_bs.shape[1])
    peer: Any = theirs
    run = without(lambda: [peer(ids_bs, logits_to_keep=1).logits]) if _is_there(theirs) else None
    return _columns(ours, theirs, path, run)


def _small_enough(theirs: nn.Module | str, lm: MambaLM, length: int) -> nn.Module | str:
    """Return the model, or why it would fill the memory of a small machine.

    transformers multiplies B and C of all pairs of a chunk before it sums over the state.
    """
    mixer: Any = next(iter(lm.backbone.layers)).mixer  # pyright: ignore[reportArgumentType]
    if isinstance(theirs, str) or not isinstance(mixer, Mamba2):
        return theirs
    pairs = 4.0 * length * min(length, THEIR_CHUNK) * mixer.nheads * mixer.d_state
    if pairs <= MOST_BYTES:
        return theirs
    return f"transformers makes tensors of {pairs / 1e9:.1f} GB for this length"


def _is_there(theirs: nn.Module | str) -> bool:
    return isinstance(theirs, nn.Module)


def _columns(
    ours: Callable[..., Callable[[], Sequence[Tensor]]],
    theirs: nn.Module | str,
    path: SsdPath | None,
    run: Callable[[], Sequence[Tensor]] | None,
) -> Ways:
    absent = theirs if isinstance(theirs, str) else ""
    return {
        "native": Way(ours("native"), slow=True),
        "portable": portable(ours("portable", path), path_note(path), slow=True),
        "transformers": absent if run is None else Way(run, slow=True),
        JUDGE: portable(ours("reference")),
    }


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
