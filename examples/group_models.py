"""Models for words in groups, and weights worked out by hand that solve A5 with one layer.

A5 is the group of rotations of an icosahedron, so a state that is a rotation in space can hold the
running product exactly. The transition of a quaternion block is a unit quaternion, which is such a
rotation up to a sign that carries no meaning. No linear readout is blind to a sign: after the block
there must be products of its outputs, and a gated MLP is the layer that has them.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

import anymamba as am
from anymamba.models import LatentConfig
from anymamba.nn import StackConfig
from groups import GROUPS, Group
from reset_models import READ, held_vector, raw_angle, solve

# The block of the original study; its rotation is chosen beside it.
BLOCK = {"d_state": 16, "headdim": 8, "expand": 2}
WIDTH = 32


def model_of(
    group: Group,
    *,
    rotation: str,
    has_mlp: bool,
    d_model: int = WIDTH,
    block: dict[str, Any] | None = None,
) -> am.LatentModel:
    """Return an untrained model: symbols in, an element of the group out, at every place.

    Args:
        group: whose elements are the classes.
        rotation: "complex" or "quaternion".
        has_mlp: whether a gated MLP follows the block.
        d_model: width of the stream.
        block: its sizes; those of the original study by default.
    """
    options = {
        "layer": "Mamba3",
        "rope_fraction": 1.0,
        "rotation_range": 2.0,
        "a_activation": "softplus",
        "bias": True,
        "rotation": rotation,
        **(block or BLOCK),
    }
    stack = StackConfig(
        d_model=d_model, n_layer=1, ssm_cfg=options, d_intermediate=128 if has_mlp else 0
    )
    return am.LatentModel(
        LatentConfig(d_input=3, d_output=len(group.elements), stack=stack, task="classification")
    )


def build_a5() -> Any:
    """Return a model with 4 heads of a quaternion each that is right at every depth.

    The stream has 16 places: 0 to 3 take the quaternion, 4 to 12 its rotation matrix, which the MLP
    makes of it, and 13 to 15 the symbols.
    """
    group = GROUPS["A5"]
    model: Any = model_of(
        group,
        rotation="quaternion",
        has_mlp=True,
        d_model=16,
        block={"d_state": 4, "headdim": 4, "expand": 1},
    )
    first, second, elements = icosahedral()
    channels = held_vector(heads=4, key=[1.0, 0.0, 0.0, 0.0])
    # Heads are 4 wide; the first of their values says it all.
    channels["z"] = [row for row in channels["z"] for _ in range(4)]
    channels["x"] = [row for wide in channels["x"] for row in (wide, *[[0.0] * 3] * 3)]
    # Vectors along the axes, by the symbols' angles; the reference does not turn.
    vectors = [turn_of(first), turn_of(second), [0.0] * 3]
    channels["rotation"] = [list(axis) for axis in zip(*vectors, strict=True)] * 4
    block = solve(model, (4 * torch.eye(16)[13:]).tolist(), channels)
    layer = model.stack.layers[0]
    with torch.no_grad():
        for head in range(4):
            block.C_bias[head, 0] = 2 * (torch.eye(4)[head] - torch.eye(4)[0])
        # Loud enough that the norm after it sees the quaternion alone: 4 q.
        block.out_proj.weight.zero_()
        block.out_proj.weight[range(4), range(0, 16, 4)] = 1e4
        layer.mlp.fc1.weight.zero_()
        layer.mlp.fc2.weight.zero_()
        hidden = layer.mlp.fc2.in_features
        pairs = list(itertools.combinations_with_replacement(range(4), 2))
        forms = matrix_forms()
        for place, (a, b) in enumerate(pairs):
            # silu(u) v + silu(-u) (-v) = u v: two hidden units make an exact product.
            for unit, sign in ((2 * place, 1.0), (2 * place + 1, -1.0)):
                layer.mlp.fc1.weight[unit, a] = sign
                layer.mlp.fc1.weight[hidden + unit, b] = sign
                layer.mlp.fc2.weight[4:13, unit] = forms[:, a, b] + (a != b) * forms[:, b, a]
        matrices = torch.stack([matrix_of(element) for element in elements])
        model.head.weight.zero_()
        # The trace of R(q) R(g)^T is 1 + 2 cos of the angle between them: largest where g = q.
        model.head.weight[:, 4:13] = READ * matrices.flatten(1).float()
    return model


def icosahedral() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return unit quaternions that multiply like the generators of A5, and one for each class.

    The angles follow from the orders of the generators, and the angle between their axes from the
    order of their product; which of the few multiples fit is tried out.
    """
    group = GROUPS["A5"]
    for turns_first, turns_second, turns_product in itertools.product((1, 2), (1, 2), (1, 2, 3, 4)):
        half_first, half_second = math.pi * turns_first / 5, math.pi * turns_second / 3
        between = math.cos(half_first) * math.cos(half_second)
        between -= math.cos(math.pi * turns_product / 5)
        between /= math.sin(half_first) * math.sin(half_second)
        if abs(between) > 1:
            continue
        axis = math.sin(math.acos(between))
        first = quaternion(half_first, (0.0, 0.0, 1.0))
        second = quaternion(half_second, (axis, 0.0, between))
        elements = spell(group, first, second)
        if elements is not None:
            return first, second, elements
    raise AssertionError("A5 is the rotation group of the icosahedron; some multiple must fit")


def spell(group: Group, first: Tensor, second: Tensor) -> list[Tensor] | None:
    """Return the product of each class; None if two spellings of a class are not the same turn."""
    found: dict[int, Tensor] = {0: quaternion(0.0, (0.0, 0.0, 1.0))}
    waiting = [0]
    while waiting:
        here = waiting.pop()
        for symbol, generator in enumerate((first, second)):
            there = int(group.table[symbol, here])
            product = multiply(generator, found[here])
            if there not in found:
                found[there] = product
                waiting.append(there)
            elif (product * found[there]).sum().abs() < 1 - 1e-9:
                return None
    return [found[number] for number in range(len(group.elements))]


def quaternion(half_angle: float, axis: tuple[float, float, float]) -> Tensor:
    """Return the unit quaternion that turns by twice an angle about a unit axis."""
    vector = [math.sin(half_angle) * part for part in axis]
    return torch.tensor([math.cos(half_angle), *vector], dtype=torch.float64)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two quaternions."""
    return left_matrix(a) @ b


def left_matrix(q: Tensor) -> Tensor:
    """Return the matrix of a multiplication from the left."""
    w, x, y, z = q.tolist()
    return torch.tensor(
        [[w, -x, -y, -z], [x, w, -z, y], [y, z, w, -x], [z, -y, x, w]], dtype=torch.float64
    )


def matrix_forms() -> Tensor:
    """Return the quadratic forms (9, 4, 4) that make a rotation matrix of a quaternion."""
    units = torch.eye(4, dtype=torch.float64)
    conjugate = torch.diag(torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64))
    forms = torch.zeros(3, 3, 4, 4, dtype=torch.float64)
    for row, column, a, b in itertools.product(range(3), range(3), range(4), range(4)):
        # q v q*: linear in q on the left and in q on the right.
        turned = multiply(multiply(units[a], units[1 + column]), conjugate @ units[b])
        forms[row, column, a, b] = turned[1 + row]
    return forms.flatten(0, 1)


def matrix_of(q: Tensor) -> Tensor:
    """Return the rotation matrix (3, 3) of a unit quaternion."""
    return (matrix_forms() @ q @ q).unflatten(0, (3, 3))


def turn_of(q: Tensor) -> list[float]:
    """Return the block's raw rotation vector for a unit quaternion with a step of 1."""
    half_angle = math.acos(float(q[0]))
    raw = raw_angle(2 * half_angle)
    return [raw * float(part) / math.sin(half_angle) for part in q[1:]]
