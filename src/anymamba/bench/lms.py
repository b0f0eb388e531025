"""The cases of whole models: a prompt and a training step, published sizes, random weights."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anymamba.bench.blocks import best_path
from anymamba.bench.case import JUDGE, Case, Way, Ways, exact, portable, without
from anymamba.bench.llama import LlamaModel, llama_files
from anymamba.bench.machine import Work, free_bytes
from anymamba.bench.peers import their_lm
from anymamba.bench.portable import path_note
from anymamba.bench.words import dtype_name
from anymamba.models import MambaConfig, MambaLM, count_model, preset
from anymamba.nn import Mamba
from anymamba.ops import SsdPath

__all__ = [
    "PUBLISHED",
    "THEIR_LONGEST",
    "lm_case",
    "prompt_ids",
    "training_step",
]

PUBLISHED = ("mamba-130m", "mamba2-130m", "mamba3-siso-187m", "mamba3-mimo-187m")
GATE = 12
# Runs of a whole model on two cores take seconds.
TURNS = 2
LONG = 1024
# Tokens of a training step of transformers' Mamba-1, a loop over tokens whose backward is quadratic
# in their number: 54 seconds for 256 of mamba-130m on two cores, with 5 GB, by the clock alone. In
# an earlier run of the bench one such step reached 21 GB. The profiler keeps a record of every
# operation of that loop, so its memory is not measured at this length.
THEIR_LONGEST = 256
# What it took, and room for our own step.
THEIR_BYTES = 8e9
QUADRATIC = "the backward of its Mamba-1 is quadratic in the length; 256 tokens show it"
TOO_LARGE = "256 tokens of its Mamba-1 may need 8 GB, which are not free here"
SHORTER = "takes minutes here; 256 tokens show it"
ITS_BLOCKS = "256 tokens in float32 show it, and the blocks show it at 2048"
NARROW_TRAINING = "float32 shows it"


def lm_case(
    name: str,
    length: int,
    mode: str,
    config: MambaConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Return the case of a whole model and one sequence.

    Args:
        name: of a preset.
        length: tokens of the sequence.
        mode: "forward" reads a prompt: the state, and the logits of its last token. "train" is the
            loss and the gradient of every weight; the optimiser would be the same on both sides.
        config: another model than the preset of that name.
        dtype: of the weights; in training torch.bfloat16 is autocast over float32 weights.
    """
    chosen = config or preset(name)
    trains = mode == "train"
    parts = count_model(MambaLM(chosen, device="meta"), length=length).parts
    head = sum(part.flops for part in parts if part.kind == "head")
    body = sum(part.flops for part in parts) - head
    flops = 3.0 * (body + head) * length if trains else float(body * length + head)

    def prepare() -> Callable[[int], Ways]:
        models = _models(chosen, dtype, trains)
        setting = _setting(models.lm, length, dtype, mode)
        ways = _training if trains else _reading
        return lambda length: ways(models, setting, prompt_ids(length, chosen.vocab_size))

    return Case(
        group="train" if trains else "prefill",
        name=f"{name} b1 s{length}",
        mode=mode,
        dtype=dtype,
        tokens=length,
        work=Work(flops=flops),
        length=length,
        gate_length=min(length, GATE),
        prepare=prepare,
    )


class _Models(NamedTuple):
    """One model as everybody has it; a sentence says why somebody has it not."""

    lm: MambaLM
    transformers: nn.Module | str
    llama: LlamaModel | str


class _Setting(NamedTuple):
    """How a model is run."""

    path: SsdPath | None
    dtype: torch.dtype
    is_long: bool

    @property
    def is_narrow(self) -> bool:
        return self.dtype == torch.bfloat16


# The model that was built last: cases that follow each other use the same one.
_last: dict[tuple[str, torch.dtype, bool], _Models] = {}


def _models(config: MambaConfig, dtype: torch.dtype, trains: bool) -> _Models:
    key = (repr(config), dtype, trains)
    if key not in _last:
        _last.clear()
        torch.manual_seed(0)
        lm = MambaLM(config, dtype=torch.float32 if trains else dtype)
        files = "llama.cpp trains nothing" if trains else llama_files(lm)
        llama = files if isinstance(files, str) else files.open(dtype_name(dtype))
        _last[key] = _Models(lm, their_lm(lm), llama)
    return _last[key]


def _setting(lm: MambaLM, length: int, dtype: torch.dtype, mode: str) -> _Setting:
    is_narrow, is_long = dtype == torch.bfloat16, length > LONG
    path = None if is_narrow or is_long else best_path(_mixer(lm), 1, length, mode)
    return _Setting(path, dtype, is_long)


def prompt_ids(length: int, vocabulary: int) -> Tensor:
    """Return the ids of one sequence, always the same."""
    return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(1))


def _training(models: _Models, setting: _Setting, ids_bs: Tensor) -> Ways:
    lm: MambaLM = models.lm
    autocast = _autocast if setting.is_narrow else nullcontext

    def ours(**how: Any) -> Callable[[], Sequence[Tensor]]:
        return training_step(lm, lambda: lm.loss(ids_bs, **how), autocast)

    plain = training_step(lm, lambda: lm.loss(ids_bs, impl="reference"))
    theirs: Any = models.transformers
    peer: Way | str = theirs
    if setting.is_narrow and not isinstance(theirs, str):
        peer = NARROW_TRAINING
    elif not isinstance(theirs, str):
        run = training_step(theirs, lambda: theirs(ids_bs, labels=ids_bs).loss)
        peer = Way(run, turns=TURNS)
        if isinstance(_mixer(lm), Mamba):
            peer = Way(run, turns=1, weighed=False)
            if ids_bs.shape[1] > THEIR_LONGEST:
                peer = QUADRATIC
            elif free_bytes() < THEIR_BYTES:
                peer = TOO_LARGE
    return {**_ours(setting, ours), **exact(plain, setting.dtype), "transformers": peer}


def _reading(models: _Models, setting: _Setting, ids_bs: Tensor) -> Ways:
    lm: MambaLM = models.lm

    def ours(**how: Any) -> Callable[[], Sequence[Tensor]]:
        return without(lambda: [lm.prefill(ids_bs, num_last_tokens=1, **how).logits])

    @torch.no_grad()
    def wide() -> Sequence[Tensor]:
        widened = copy.deepcopy(lm).float()
        return [widened.prefill(ids_bs, num_last_tokens=1, impl="reference").logits]

    theirs: Any = models.transformers
    peer: Way | str = theirs
    if setting.is_narrow and setting.is_long and not isinstance(theirs, str):
        peer = SHORTER
    elif not isinstance(theirs, str):
        run = without(lambda: [theirs(ids_bs, logits_to_keep=1).logits])
        peer = Way(run, turns=TURNS)
    llama: Any = models.llama
    other: Way | str = llama
    if not isinstance(llama, str):
        other = Way(lambda: [llama.read(ids_bs[0]).view(1, 1, -1)], turns=TURNS, outside=True)
    return {
        **_ours(setting, ours),
        **exact(wide, setting.dtype),
        "transformers": peer,
        "llama.cpp": other,
    }


def _ours(setting: _Setting, ours: Callable[..., Callable[[], Sequence[Tensor]]]) -> Ways:
    path = setting.path
    plain = portable(ours(impl="portable", path=path), path_note(path), turns=TURNS)
    return {
        "native": Way(ours(impl="native"), turns=TURNS),
        "portable": ITS_BLOCKS if setting.is_narrow or setting.is_long else plain,
        JUDGE: portable(ours(impl="reference")),
    }


def _mixer(lm: MambaLM) -> Any:
    return next(iter(lm.backbone.layers)).mixer  # pyright: ignore[reportArgumentType]


def _autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


def training_step(
    model: nn.Module,
    loss: Callable[[], Tensor],
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Callable[[], Sequence[Tensor]]:
    """Return a function that computes the loss and the gradient of every weight.

    Args:
        model: whose weights; ours or transformers'.
        loss: of that model.
        around: what is entered for the loss and left before the backward.
    """
    named = {
        name.replace(".embeddings.", ".embedding."): weight
        for name, weight in model.named_parameters()
    }
    weights = [named[name] for name in sorted(named)]

    def run() -> Sequence[Tensor]:
        with around():
            value = loss()
        return [value.detach(), *torch.autograd.grad(value, weights)]

    return run
