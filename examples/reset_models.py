"""The smallest models of the reset tasks, and weights for them that were worked out by hand.

A model is one block between two linear maps, 62 to 328 parameters. The weights prove that the model
can do the task exactly; whether it also learns to is what `reset.py` measures.
"""

import math
from typing import Any

import torch

import anymamba as am
from anymamba.models import LatentConfig
from anymamba.nn import ResidualConfig, StackConfig
from reset_tasks import TASKS

# What the block of each task is made of; every head has width 1.
BLOCKS: dict[str, dict[str, Any]] = {
    "reset-majority": {"layer": "Mamba2", "d_model": 2, "d_state": 1, "d_conv": 1},
    "reset-rotor": {"layer": "Mamba3", "d_model": 2, "d_state": 2},
    "reset-spinor": {
        "layer": "Mamba3",
        "d_model": 4,
        "d_state": 4,
        "rotation": "quaternion",
    },
}
# softplus as in the paper; a range of 2 half turns, which a quaternion needs to reach every turn.
MAMBA3 = {"rope_fraction": 1.0, "rotation_range": 2.0, "a_activation": "softplus"}

ROOT2 = math.sqrt(2)
# Where the three symbols lie: the norm before the block leaves a length of sqrt(2) alone.
PLANE = [[ROOT2, 0.0], [0.0, ROOT2], [-1.0, -1.0]]
OPEN = 5.0  # a gate that is open: silu(5) = 4.97
HOLD, FORGET = -20.0, 20.0  # raw decay rates: softplus gives 2e-9 (floored at 1e-4) and 20
READ = 3.0  # how decided the logits are


def model_of(task: str, **options: Any) -> am.LatentModel:
    """Return the untrained model of a task.

    Args:
        task: its name.
        options: arguments of the block that differ from the task's own, such as
            `rotation="complex"`.
    """
    block = {**BLOCKS[task], "expand": 1, "headdim": 1, "bias": True}
    if block["layer"] == "Mamba3":
        block |= MAMBA3
    block |= options
    stack = StackConfig(
        d_model=block.pop("d_model"),
        n_layer=1,
        ssm_cfg=block,
        # The head sees the block alone: with the input beside it, part of the answer would be free.
        residual=ResidualConfig(skip_last=True),
    )
    return am.LatentModel(
        LatentConfig(d_input=3, d_output=TASKS[task].classes, stack=stack, task="classification")
    )


def build_majority(*, hold: float = 0.999, gain: float = 1.0, resets: bool = True) -> Any:
    """Return a Mamba-2 that counts votes in head 0; head 1 is a constant to compare with.

    Args:
        hold: what a vote leaves of the votes before it.
        gain: votes in units of the constant.
        resets: whether R empties the count; else it decays like everything else.
    """
    model = model_of("reset-majority")
    # One vote adds dt * B * C * 0.2 = 2 * gain; the step is short so that `hold` is a mild rate.
    step, keys = 1e-3, 100.0
    dt = [inverse_softplus(step)] * 2 + [inverse_softplus(FORGET if resets else step)]
    channels = {
        "z": [[OPEN] * 3] * 2,
        "x": [[inverse_silu(-0.2), inverse_silu(0.2), 0.0], [inverse_silu(1.0)] * 3],
        "B": [[inverse_silu(keys)] * 3],
        "C": [[inverse_silu(keys * gain)] * 3],
        "dt": [dt, [inverse_softplus(1e-12)] * 3],
    }
    block = solve(model, PLANE, channels)
    with torch.no_grad():
        block.conv1d.weight.fill_(1.0)
        block.conv1d.bias.zero_()
        block.A_log.copy_(torch.tensor([math.log(-math.log(hold) / step), 0.0]))
        block.D.copy_(torch.tensor([0.0, 1.0]))
        model.head.weight.copy_(torch.tensor([[-READ, 0.0], [READ, 0.0]]))
    return model


def build_rotor(*, angles: tuple[float, float, float] | None = None) -> Any:
    """Return a Mamba-3 whose state is a vector that - and + turn by a third of a circle.

    R forgets the vector and writes it anew. Head 0 reads its first coordinate, head 1 the other.

    Args:
        angles: of a turn at -, + and R; the thirds of a circle by default.
    """
    third = 2 * math.pi / 3
    model = model_of("reset-rotor")
    turns = (-third, third, 0.0) if angles is None else angles
    channels = held_vector(heads=2, key=[1.0, 0.0])
    channels["rotation"] = [[raw_angle(turn) for turn in turns]]
    block = solve(model, PLANE, channels)
    with torch.no_grad():
        # The norm makes (1, 0) of length sqrt(2); the bias turns head 1's query to (0, sqrt(2)).
        block.C_bias[1] = torch.tensor([[-ROOT2, ROOT2]])
        thirds = third * torch.arange(3)
        model.head.weight.copy_(READ * torch.stack([thirds.cos(), -thirds.sin()], 1))
    return model


def build_counter(*, hold: float) -> Any:
    """Return a Mamba-3 without rotation that adds up turns in head 0 instead: an ablation.

    Args:
        hold: what a turn leaves of the turns before it.
    """
    model = model_of("reset-rotor", rope_fraction=0.0)
    channels = held_vector(heads=2, key=[1.0, 0.0])
    channels["x"] = [[-1.0, 1.0, 0.0], [0.0] * 3]
    channels["A"] = [[inverse_softplus(-math.log(hold))] * 2 + [FORGET]] * 2
    channels["rotation"] = [[0.0] * 3]
    solve(model, PLANE, channels)
    return model


def build_spinor(*, rotation: str = "quaternion") -> Any:
    """Return a Mamba-3 whose state is the running product; head h reads its h-th coordinate.

    Args:
        rotation: "complex" gives the ablation that turns one plane at i and another one at j.
    """
    model = model_of("reset-spinor", rotation=rotation)
    is_complex = rotation == "complex"
    channels = held_vector(heads=4, key=[1.0, 0.0, float(is_complex), 0.0])
    half = raw_angle(math.pi / 2 if is_complex else math.pi)
    at_i, at_j, still = [half, 0.0, 0.0], [0.0, half, 0.0], [0.0, 0.0, 0.0]
    channels["rotation"] = [at_i, at_j] if is_complex else [at_i, at_j, still] * 4
    block = solve(model, (2 * torch.eye(4)[:3]).tolist(), channels)
    with torch.no_grad():
        query = block.C_norm(torch.tensor(channels["C"])[:, 0])
        for head in range(4):
            block.C_bias[head, 0] = 2 * torch.eye(4)[head] - query
        units = torch.eye(4)
        model.head.weight.copy_(READ * torch.cat([units, -units]))
    return model


def held_vector(heads: int, key: list[float]) -> dict[str, list[list[float]]]:
    """Return the channels that all Mamba-3 solutions share: R writes a vector, which then stays."""
    keys = [[value] * 3 for value in key]
    return {
        "z": [[OPEN] * 3] * heads,
        "x": [[0.0, 0.0, 1.0]] * heads,
        "B": keys,
        "C": keys,
        "dt": [[inverse_softplus(1.0)] * 3] * heads,
        "A": [[HOLD, HOLD, FORGET]] * heads,
        "lambda": [[FORGET] * 3] * heads,  # the new token alone enters, not the one before it
    }


@torch.no_grad()
def solve(model: Any, places: list[list[float]], channels: dict[str, list[list[float]]]) -> Any:
    """Write weights that give every channel of the block its value at every symbol.

    A channel is affine in the place of a symbol, and three places in general position leave nothing
    open. Norms and the output projection become the identity, biases and skips zero.

    Args:
        model: of `model_of`.
        places: where the three symbols lie in the stream; length sqrt(width), for the norm.
        channels: for each part of `in_proj`, its rows' values at the three symbols.

    Returns:
        The block, for what a task has besides.
    """
    layer = model.stack.layers[0]
    block = layer.mixer
    # What the norm leaves of the places: nearly all, and R multiplies what is missing by `FORGET`.
    where = layer.norm(torch.tensor(places)).double()
    values: list[list[float]] = []
    for part, rows in block.projection_rows["in_proj"].items():
        wanted = channels[part] if rows else []
        if len(wanted) != rows:
            raise ValueError(f"solve: {part} has {rows} rows; got values for {len(wanted)}.")
        values += wanted
    affine = torch.cat([where, torch.ones(3, 1, dtype=torch.float64)], 1)
    # The smallest solution where the stream is wider than the plane of the three places.
    solution = torch.linalg.pinv(affine) @ torch.tensor(values, dtype=torch.float64).T
    block.in_proj.weight.copy_(solution[:-1].T)
    block.in_proj.bias.copy_(solution[-1])
    model.in_proj.weight.copy_(torch.tensor(places).T)
    for name in ("dt_bias", "D", "B_bias", "C_bias"):
        if hasattr(block, name):
            getattr(block, name).zero_()
    block.out_proj.weight.copy_(torch.eye(where.shape[1]))
    for bias in (model.in_proj.bias, block.out_proj.bias, model.head.bias):
        bias.zero_()
    return block


def raw_angle(angle: float) -> float:
    """Return what the block turns into an angle per unit of time."""
    return math.atanh(angle / (MAMBA3["rotation_range"] * math.pi))


def inverse_softplus(value: float) -> float:
    """Return the number whose softplus is a positive value."""
    return value + math.log(-math.expm1(-value))


def inverse_silu(value: float) -> float:
    """Return the number right of the minimum whose silu is a value above -0.278."""
    x = value if value > 1 else 0.5 + value
    for _ in range(60):  # Newton; silu is convex and rising from its minimum to beyond 2
        sigmoid = 1 / (1 + math.exp(-x))
        x -= (x * sigmoid - value) / (sigmoid * (1 + x * (1 - sigmoid)))
    return x
