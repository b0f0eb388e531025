"""Models to replicate, and what one of two processes does with them.

python replica_cases.py STORE RANK      exits with 1 if a gradient is not the mean of both
"""

import sys
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anymamba.models import (
    Encoder,
    EncoderConfig,
    LatentConfig,
    LatentModel,
    MambaConfig,
    MambaLM,
    hybrid_config,
)
from anymamba.nn import (
    BidirectionalConfig,
    Marker,
    MultiGate,
    RegisterConfig,
    ResidualConfig,
    StackConfig,
    VirtualLayers,
)

MAMBA1 = {"layer": "Mamba1", "d_state": 4}
MAMBA2 = {"layer": "Mamba2", "d_state": 4, "headdim": 4}
MAMBA3 = {"layer": "Mamba3", "d_state": 8, "headdim": 4}
ATTENTION = {"layer": "MHA", "causal": True, "num_heads": 2}
SHARED = ResidualConfig(multi_gate=MultiGate(n_stream=2, per_virtual=False), skip_last=True)
S, M, E, C = Marker.start(), Marker.middle(), Marker.end(), Marker.custom

CAUSAL: dict[str, dict[str, Any]] = {
    "mamba1": {"layers": [MAMBA1, MAMBA1]},
    "mamba2 and mlp": {"layers": [MAMBA2, MAMBA2], "d_intermediate": 8, "final_norm": True},
    "mixture": {"layers": [MAMBA1, MAMBA2, MAMBA3, ATTENTION], "rms_norm": False},
    "initial state": {"layers": [{**MAMBA3, "learnable_init_state": True}]},
    "mimo": {"layers": [{**MAMBA3, "is_mimo": True, "mimo_rank": 2, "rotation": "quaternion"}]},
    "virtual": {"layers": [MAMBA3, MAMBA2], "virtual": VirtualLayers(5, "stretched")},
    "listed": {"layers": [MAMBA3, MAMBA2], "virtual": VirtualLayers(4, [1, 0, 0, 1])},
    "skips": {"layers": [MAMBA3], "residual": ResidualConfig(skip_first=True)},
    "one stream": {
        "layers": [MAMBA3] * 2,
        "residual": ResidualConfig(multi_gate=MultiGate(n_stream=1)),
    },
    "collecting only": {
        "layers": [MAMBA3] * 2,
        "residual": ResidualConfig(multi_gate=MultiGate(n_stream=3)),
    },
    "shared gates": {"layers": [MAMBA3] * 2, "virtual": VirtualLayers(6), "residual": SHARED},
    "horizon": {"layers": [MAMBA3] * 3, "grad_horizon": 1, "final_norm": True},
    "nothing differentiated": {"layers": [MAMBA3] * 2, "grad_horizon": 0},
    "gates and horizon": {
        "layers": [MAMBA3] * 2,
        "virtual": VirtualLayers(6),
        "residual": ResidualConfig(multi_gate=MultiGate(n_stream=2)),
        "grad_horizon": 2,
    },
    "registers": {
        "layers": [MAMBA3] * 2,
        "registers": RegisterConfig(stack=[S, M, E], layers={1: [C(1), E]}),
    },
    "registers that do not land": {
        "layers": [MAMBA3] * 2,
        "registers": RegisterConfig(stack=[C(9)], layers={0: [C(99)]}),
    },
    "registers below a horizon": {
        "layers": [MAMBA3] * 2,
        "virtual": VirtualLayers(4),
        "grad_horizon": 1,
        "registers": RegisterConfig(stack=[S], layers={0: [C(99), E]}),
    },
}
PAIRED: dict[str, dict[str, Any]] = {
    "pairs": {"layers": [MAMBA1, MAMBA2, MAMBA3, MAMBA3]},
    "pairs with merges": {"layers": [MAMBA3] * 4, "merge": "cat_linear", "d_intermediate": 8},
    "shared pairs": {
        "layers": [MAMBA3] * 4,
        "virtual": VirtualLayers(10, "strided_cyclic"),
        "merge": "cat_linear",
    },
    "one layer both ways": {
        "layers": [MAMBA3],
        "virtual": VirtualLayers(4, "symmetric_cyclic"),
        "residual": ResidualConfig(multi_gate=MultiGate(n_stream=2, per_virtual=False)),
    },
    "pairs and registers": {"layers": [MAMBA3] * 2, "registers": RegisterConfig(stack=[S, C(9)])},
}
HEADS: dict[str, dict[str, Any]] = {
    "pooled": {},
    "classes": {"n_classes": 3},
    "tokens": {"head": "tokens", "n_classes": 3},
    "masked": {"head": "masked"},
    "register": {"pool": "register"},
}
LANGUAGE = {
    "lm": MambaConfig(d_model=8, n_layer=2, vocab_size=16, ssm_cfg=MAMBA3, d_intermediate=8),
    "lm untied": MambaConfig(d_model=8, n_layer=1, vocab_size=16, tie_embeddings=False),
    "lm virtual horizon": MambaConfig(
        d_model=8, n_layer=2, vocab_size=16, virtual=VirtualLayers(6), grad_horizon=2
    ),
    "lm gates": MambaConfig(
        d_model=8, n_layer=2, vocab_size=16, virtual=VirtualLayers(6), residual=SHARED
    ),
    "lm hybrid": hybrid_config(
        16, 6, head_dim=8, vocab_size=16, ssm_cfg={"headdim": 4, "d_state": 8}
    ),
}
REPLICAS = [
    *CAUSAL,
    *PAIRED,
    *(f"encoder {name}" for name in HEADS),
    *LANGUAGE,
]


class Replica(NamedTuple):
    """A model and what it is called with."""

    model: nn.Module
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def build_replica(name: str, length: int = 5) -> Replica:
    """Return a model by its name, always with the same weights and inputs."""
    torch.manual_seed(0)
    ids = torch.arange(2 * length).view(2, length) % 16
    if name in LANGUAGE:
        return Replica(MambaLM(LANGUAGE[name]), (ids,), {})
    if name.startswith("encoder "):
        registers = RegisterConfig(stack=[S, E])
        stack = BidirectionalConfig(
            d_model=8, layers=[MAMBA3] * 2, registers=registers, final_norm=True
        )
        config = EncoderConfig(vocab_size=16, stack=stack, **HEADS[name.removeprefix("encoder ")])
        return Replica(Encoder(config), (ids,), {"lengths": torch.tensor([length, length - 2])})
    if name in PAIRED:
        stack = BidirectionalConfig(d_model=8, **PAIRED[name])
    else:
        stack = StackConfig(d_model=8, **CAUSAL[name])
    model = LatentModel(LatentConfig(d_input=2, d_output=2, stack=stack))
    return Replica(model, (torch.linspace(-1, 1, 4 * length).view(2, length, 2),), {})


def agrees(name: str, rank: int) -> bool:
    """Return whether the gradients of two replicas are the mean of those of each half."""
    lengths = (12, 5)
    wanted: dict[str, torch.Tensor] = {}
    for length in lengths:
        alone = build_replica(name, length)
        alone.model(*alone.arguments, **alone.options).float().square().mean().backward()
        for key, weight in alone.model.named_parameters():
            if weight.requires_grad:
                assert weight.grad is not None, key
                wanted[key] = wanted.get(key, 0) + weight.grad / 2
    replica = build_replica(name, lengths[rank])
    model = DistributedDataParallel(replica.model, find_unused_parameters=False)
    for _ in range(2):
        model.zero_grad()
        model(*replica.arguments, **replica.options).float().square().mean().backward()
    found = {key: weight.grad for key, weight in replica.model.named_parameters()}
    return all(torch.allclose(x, found[key], atol=1e-6, rtol=1e-4) for key, x in wanted.items())


def main() -> int:
    """Join the other process, compare, and return the exit code."""
    file, rank = sys.argv[1], int(sys.argv[2])
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(file, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    wrong = [name for name in REPLICAS if not agrees(name, rank)]
    dist.destroy_process_group()
    sys.stderr.write(f"{wrong}\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
