"""The cases of the blocks: every family, in forward, train and step."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anymamba.bench.case import JUDGE, Case, Way, Ways, backward, portable, without
from anymamba.bench.machine import Work
from anymamba.bench.memory import tensor_bytes
from anymamba.bench.peers import their_mixer, their_step
from anymamba.bench.portable import CoreSizes, fastest_path, path_note
from anymamba.nn import Mamba, Mamba2, Mamba3, flops_per_token, state_bytes
from anymamba.ops import SsdPath

__all__ = ["LARGE", "SMALL", "BlockCase", "best_path", "block_cases"]

GATE = 70
NO_STEP_KERNEL = "one token runs portable code: there is no compiled kernel for it"

# Every token's slice of its loop has a gradient as long as the sequence.
LONG = 1024
QUADRATIC = (
    "the backward of its Mamba-1 is quadratic in the length, a minute or more here; the smaller "
    "blocks and the whole models show it"
)


class BlockCase(NamedTuple):
    """A block and the shape of its input."""

    name: str
    make: Callable[..., Any]  # (width, **extra) -> block
    batch: int
    length: int
    width: int


def _mamba3(**options: Any) -> Callable[[int], Any]:
    return lambda width: Mamba3(width, **options)


_SMALL: dict[str, Any] = {"d_state": 64, "headdim": 64}
_MIMO: dict[str, Any] = {"is_mimo": True, "mimo_rank": 4}
# The cases of burn-mamba's block bench.
SMALL = tuple(
    BlockCase(name, make, 2, 256, 256)
    for name, make in {
        "mamba1": lambda width: Mamba(width, d_state=16),
        "mamba2": lambda width: Mamba2(width, **_SMALL),
        "mamba3 siso": _mamba3(**_SMALL),
        "mamba3 mimo 1": _mamba3(**_SMALL, is_mimo=True, mimo_rank=1),
        "mamba3 mimo 4": _mamba3(**_SMALL, **_MIMO),
        "mamba3 quaternion": _mamba3(**_SMALL, rotation="quaternion"),
        "mamba3 double": _mamba3(**_SMALL, pathway="double"),
    }.items()
)
# The blocks of the published models of 130 and 187 million parameters, and their relatives.
LARGE = tuple(
    BlockCase(name, make, 1, 2048, 768)
    for name, make in {
        "Mamba-1": Mamba,
        "Mamba-2": Mamba2,
        "Mamba-3 SISO": _mamba3(),
        "Mamba-3 MIMO 4": _mamba3(**_MIMO),
        "Mamba-3 quaternion": _mamba3(rotation="quaternion"),
        "Mamba-3 double": _mamba3(pathway="double"),
    }.items()
)


def block_cases(
    group: str, block: BlockCase, modes: Sequence[str] = ("forward", "train", "step")
) -> list[Case]:
    """Return a block's cases, in float32.

    Args:
        group: which table they belong to.
        block: what is built, and for which input.
        modes: any of "forward", "train" and "step".
    """
    name, make, batch, length, width = block
    with torch.device("meta"):
        shape = make(width)

    def prepare(mode: str) -> Callable[[int], Ways]:
        torch.manual_seed(0)
        module = make(width)
        theirs = their_mixer(module)
        if mode == "step":
            return lambda length: _step_ways(module, theirs, _tokens(batch, length, width))
        path = best_path(shape, batch, length, mode)
        return lambda length: _ways(module, theirs, path, _tokens(batch, length, width), mode)

    return [
        Case(
            group=group,
            name=f"{name} b{batch} s{length} d{width}",
            mode=mode,
            dtype=torch.float32,
            tokens=batch * (1 if mode == "step" else length),
            work=_work(shape, batch, length, mode),
            # A step costs the same after any number of tokens.
            length=8 if mode == "step" else length,
            gate_length=min(length, 8 if mode == "step" else GATE),
            prepare=lambda mode=mode: prepare(mode),
        )
        for mode in modes
    ]


def _work(block: Any, batch: int, length: int, mode: str) -> Work:
    if mode == "step":
        weights = tensor_bytes(list(block.parameters()))
        return Work(moved=weights + 2 * state_bytes(block, batch))
    return Work(flops=batch * length * flops_per_token(block, training=mode == "train"))


def best_path(block: Any, batch: int, length: int, mode: str) -> SsdPath | None:
    """Return the portable core's best path at the block's sizes; Mamba-1 has no paths."""
    if isinstance(block, Mamba):
        return None
    rank = getattr(block, "mimo_rank", 1)
    # Rotations turn B and C per head, so the groups of Mamba-3 are its heads.
    groups = block.nheads if isinstance(block, Mamba3) else block.ngroups
    sizes = CoreSizes(batch, length, rank, block.nheads, groups, block.headdim, block.d_state)
    return fastest_path(sizes, mode)


def _tokens(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _ways(
    block: Any, theirs: nn.Module | str, path: SsdPath | None, u_bsd: Tensor, mode: str
) -> Ways:
    def run(module: nn.Module, **how: Any) -> Callable[[], Sequence[Tensor]]:
        # In one order for both: theirs registers its parameters in another.
        weights = [value for _, value in sorted(module.named_parameters())]
        if mode == "train":
            return backward(lambda x_bsd: [module(x_bsd, **how)], [u_bsd], weights)
        return without(lambda: [module(u_bsd, **how)])

    peer: Way | str = theirs if isinstance(theirs, str) else Way(run(theirs))
    if isinstance(block, Mamba) and mode == "train" and u_bsd.shape[1] > LONG:
        peer = QUADRATIC
    return {
        "native": Way(run(block, impl="native")),
        "portable": portable(run(block, impl="portable", path=path), path_note(path)),
        "transformers": peer,
        JUDGE: portable(run(block, impl="reference")),
    }


def _step_ways(block: Any, theirs: nn.Module | str, u_bsd: Tensor) -> Ways:
    past_bsd, last_bd = u_bsd[:, :-1], u_bsd[:, -1]
    with torch.no_grad():
        cache = block.prefill(past_bsd)[1]
    ways: Ways = {
        "native": NO_STEP_KERNEL,
        "portable": portable(without(lambda: [block.step(last_bd, cache)[0]])),
        "transformers": theirs if isinstance(theirs, str) else "",
        JUDGE: portable(without(lambda: [block(u_bsd, impl="reference")[:, -1]])),
    }
    if isinstance(theirs, nn.Module):
        step = their_step(block, theirs, past_bsd)
        ways["transformers"] = Way(without(lambda: [step(last_bd)]))
    return ways
