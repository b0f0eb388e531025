"""Context parallelism, judged on every rank against the whole sequence in one process.

python context_cases.py FOLDER RANKS      see worlds.py
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anymamba.errors import AnyMambaError
from anymamba.nn import (
    MHA,
    BidirectionalConfig,
    BidirectionalStack,
    Mamba,
    Mamba2,
    Mamba3,
    Marker,
    RegisterConfig,
    Stack,
    StackConfig,
    VirtualLayers,
    context_parallel,
)
from measure_traffic import BLOCKS as MEASURED
from measure_traffic import LENGTHS, sent_in_a_step
from simulate_parallel import Model, sent_by_inner_rank
from worlds import main, worst_of

WIDTH, LENGTH = 8, 8  # tokens per rank
MAMBA3: dict[str, Any] = {"d_state": 8, "headdim": 4}
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "mamba1": lambda: Mamba(WIDTH, d_state=4),
    "mamba2": lambda: Mamba2(WIDTH, d_state=4, headdim=4, ngroups=2, chunk_size=4),
    "mamba2 initial": lambda: Mamba2(WIDTH, d_state=4, headdim=4, learnable_init_state=True),
    "siso": lambda: Mamba3(WIDTH, **MAMBA3, rotation_range=3.0),
    "double": lambda: Mamba3(WIDTH, **MAMBA3, pathway="double", learnable_init_state=True),
    "mimo": lambda: Mamba3(WIDTH, **MAMBA3, is_mimo=True, mimo_rank=2),
    "quaternion": lambda: Mamba3(
        WIDTH, **MAMBA3, rotation="quaternion", rotation_range=3.0, is_mimo=True, mimo_rank=2
    ),
}
STACKS: dict[str, dict[str, Any]] = {
    "stack": {"layers": ["Mamba1", {"layer": "Mamba2", "headdim": 4, "d_state": 4}]},
    "stack with mlp": {
        "n_layer": 2,
        "ssm_cfg": {"layer": "Mamba3", **MAMBA3},
        "d_intermediate": 8,
        "final_norm": True,
        "virtual": VirtualLayers(3),
    },
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a module by its name, the same on every rank, with nothing left at zero."""
    torch.manual_seed(1)
    made = BLOCKS[name]() if name in BLOCKS else Stack(StackConfig(d_model=WIDTH, **STACKS[name]))
    random = torch.Generator().manual_seed(2)
    for parameter in made.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=random)
    return made.to(dtype)


def packing_of(kind: str, whole: int) -> tuple[int, dict[str, Tensor]]:
    """Return the batch and how the whole rows are packed."""
    half = whole // 2
    if kind == "borders":
        # An empty sequence, one that begins inside a convolution's width before the next shard and
        # lies over several, one of a single token.
        borders = [0, 3, 3, LENGTH - 2, half + 2, half + 3, whole - LENGTH // 2, whole]
        return 1, {"cu_seqlens": torch.tensor(borders)}
    if kind == "borders on borders":
        return 1, {"cu_seqlens": torch.tensor([0, LENGTH, whole])}
    if kind == "labels":
        labels = torch.zeros(2, whole, dtype=torch.int64)
        labels[0, half:] = 1
        labels[1, 2:] = 1
        labels[1, whole - 3 :] = 5
        return 2, {"seq_idx": labels}
    return 2, {}


def judged(name: str, kind: str, dtype: torch.dtype, with_cache: bool = False) -> float:
    """Return the worst error of values, states and gradients on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = LENGTH * size
    here = slice(rank * LENGTH, (rank + 1) * LENGTH)
    batch, packing = packing_of(kind, whole)
    random = torch.Generator().manual_seed(3)
    u = torch.randn(batch, whole, WIDTH, generator=random, dtype=torch.float64).to(dtype)
    head = torch.randn(batch, whole, WIDTH, generator=random, dtype=torch.float64).to(dtype)
    alone, shared = build(name, dtype), build(name, dtype)
    context_parallel(shared)
    before = []
    for model in (alone, shared):
        cache = None
        if with_cache:
            warm_up = torch.linspace(-1, 1, batch * 5 * WIDTH, dtype=dtype)
            cache = alone.prefill(warm_up.view(batch, 5, WIDTH))[1]
            cache = cache.detach().clone().requires_grad_()
        before.append((model, cache))

    u_whole = u.clone().requires_grad_()
    y, last = alone.prefill(u_whole, before[0][1], **packing)
    (y * head).sum().backward(retain_graph=True)
    (sum_of(last, dtype)).backward()
    expected = {f"grad {n}": p.grad for n, p in alone.named_parameters() if p.grad is not None}
    expected |= {"y": y[:, here], "grad u": u_whole.grad[:, here]}
    if with_cache and rank == 0:
        expected |= grads_of(before[0][1])

    u_here = u[:, here].clone().requires_grad_()
    y, mine = shared.prefill(u_here, before[1][1], **packing)
    loss = (y * head[:, here]).sum()
    # The state after the whole sequence is the last rank's; the others' states count nothing.
    (loss + sum_of(mine, dtype) * (rank == size - 1)).backward()
    actual = {"y": y, "grad u": u_here.grad}
    for key, parameter in shared.named_parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            actual[f"grad {key}"] = parameter.grad
    if with_cache and rank == 0:
        actual |= grads_of(before[1][1])
    return max(worst_of(expected, actual), state_error(alone, name, kind, u, mine, before[0][1]))


def sum_of(cache: Any, dtype: torch.dtype) -> Tensor:
    """Return a number that depends on the last row of every state."""
    total = torch.zeros((), dtype=dtype)
    for tensor in cache.to_tensors().values():
        if tensor.is_floating_point():
            flat = tensor[-1].flatten()
            total = total + (flat * torch.linspace(0.5, 1.5, len(flat), dtype=dtype)).sum()
    return total


def grads_of(cache: Any) -> dict[str, Tensor]:
    """Return the gradients of a state."""
    return {
        f"grad of state {n}": x.grad for n, x in cache.to_tensors().items() if x.grad is not None
    }


def state_error(alone: nn.Module, name: str, kind: str, u: Tensor, mine: Any, before: Any) -> float:
    """Return how far this rank's state is from that of one process that has come as far."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stop = (rank + 1) * LENGTH
    _, packing = packing_of(kind, LENGTH * size)
    if "cu_seqlens" in packing:
        borders = packing["cu_seqlens"]
        packing = {"cu_seqlens": borders.clamp(max=stop)}
    elif "seq_idx" in packing:
        packing = {"seq_idx": packing["seq_idx"][:, :stop]}
    _, want = alone.prefill(u[:, :stop], before, **packing)
    if "cu_seqlens" in packing:
        ends = borders.clamp(max=stop)
        touches = (ends[1:] > rank * LENGTH) & (ends.diff() > 0)
        want = want.rows(touches.nonzero()[:, 0])
    return worst_of(
        {n: x.double() for n, x in want.to_tensors().items()},
        {n: x.double() for n, x in mine.to_tensors().items()},
    )


def traffic_error(name: str) -> float:
    """Return 0 if a step sends the same bytes and messages whatever the length, and sends some."""
    lengths = LENGTHS if dist.get_world_size() == 2 else (16, 64, 512)
    sent = {sent_in_a_step(name, length) for length in lengths}
    return float(len(sent) != 1 or 0 in sent.pop())


def traffic_off_paper() -> float:
    """Return by how many bytes a rank inside the line differs from what the documents count."""
    block = build("siso", torch.float32)
    ring = context_parallel(block)
    with torch.no_grad():
        block(torch.ones(3, LENGTH, WIDTH))
    paper = Model(d_model=WIDTH, d_state=8, headdim=4, angles=block.rotation.angles)
    inner = 0 if ring.size == 2 else 1
    counted = sent_by_inner_rank(paper, ring.size, 3)
    return float(abs(ring.traffic.bytes - counted) if ring.rank == inner else 0)


def refused() -> float:
    """Return 0 if what cannot be shared out is refused with its reason."""
    wrong: list[str] = []
    registers = RegisterConfig(stack=[Marker.start()])
    paired = BidirectionalConfig(d_model=WIDTH, layers=["Mamba1", "Mamba1"])
    for model, words in (
        (MHA(WIDTH, num_heads=2), "every earlier key"),
        (Stack(StackConfig(d_model=WIDTH, n_layer=1, registers=registers)), "registers"),
        (BidirectionalStack(paired), "backwards"),
        (nn.Linear(2, 2), "must have a Mamba block"),
    ):
        try:
            context_parallel(model)
            wrong.append(words)
        except AnyMambaError as error:
            wrong += [str(error)] * (words not in str(error))
    block = build("mamba2")
    context_parallel(block)
    calls: list[tuple[dict[str, Any], int, str]] = [
        ({"cu_seqlens": torch.tensor([0, LENGTH])}, LENGTH, "whole row"),
        ({"seq_idx": torch.zeros(1, LENGTH, dtype=torch.int64)}, LENGTH, "whole rows"),
        ({}, 2, "as many tokens"),
    ]
    for packing, length, words in calls:
        try:
            block(torch.ones(1, length, WIDTH, dtype=torch.float64), **packing)
            wrong.append(words)
        except AnyMambaError as error:
            wrong += [str(error)] * (words not in str(error))
    assert not wrong, wrong
    return 0.0


CHECKS: dict[str, Callable[[], float]] = {}
for block_name in BLOCKS:
    for packing_name in ("rows", "borders", "borders on borders", "labels"):
        CHECKS[f"{block_name}, {packing_name}"] = lambda n=block_name, k=packing_name: judged(
            n, k, torch.float64
        )
    CHECKS[f"{block_name}, from a state"] = lambda n=block_name: judged(
        n, "rows", torch.float64, with_cache=True
    )
    CHECKS[f"{block_name}, float32"] = lambda n=block_name: judged(n, "rows", torch.float32)
for stack_name in STACKS:
    for packing_name in ("rows", "borders", "labels"):
        CHECKS[f"{stack_name}, {packing_name}"] = lambda n=stack_name, k=packing_name: judged(
            n, k, torch.float64
        )
    CHECKS[f"{stack_name}, float32"] = lambda n=stack_name: judged(n, "rows", torch.float32)
for measured_name in MEASURED:
    CHECKS[f"traffic, {measured_name}"] = lambda n=measured_name: traffic_error(n)
CHECKS["traffic on paper"] = traffic_off_paper
CHECKS["refused"] = refused

if __name__ == "__main__":
    main(CHECKS)
