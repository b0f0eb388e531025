"""Weights worked out by hand: four Mamba-3 blocks that calculate with brackets at any length.

Every quantity below has its own channels between the blocks. A block adds what the next one needs:

    1  depth    turns by 1/32 of a circle at `(` and back at `)`; 32 heads read the angle, and their
                combination is 1 at the present depth and 0 at the 31 others
       operand  whether the token before was one, `)` or a digit: a minus behind it is binary
    2  undo     a head per depth, emptied at `(`, holds whether the scope's sign is a minus; gates
                let only the head of a scope that closes be heard
       unary    whether the token before was a minus in front of an operand
    3  sign     half a turn at a binary minus and at a `)` that undoes one
       signed   the same times the digit: the product is made by the gates of the heads
    4  value    turns by signed fifths

Decays are 0 or 1 and turns are fractions of a circle, so that nothing is lost on the way. With more
than 31 open brackets depths coincide.
"""

import math
from typing import Any

import torch

import anymamba as am
from formal_languages import MODULUS, SYMBOLS

DEPTHS = 32
UNIT = math.log(math.e - 1)  # a step size of 1 behind softplus
OPEN, CLOSED = 20.0, -20.0  # gates and decays behind silu and softplus: themselves, and nothing
HEARD = 1 / OPEN  # takes the size of an open gate back
START = math.sqrt(2)  # the start symbol's embedding has this length: no operand is before it

# Channels of the residual stream.
TOKEN = {symbol: place for place, symbol in enumerate(SYMBOLS + "^")}  # ^ is the start
DEPTH = len(TOKEN)
OPERAND = DEPTH + DEPTHS
UNDO, UNARY = OPERAND + 1, OPERAND + 3  # and 1 minus it in the channel behind: the norm stays
SIGNED = OPERAND + 5
SIGN = SIGNED + MODULUS
VALUE = SIGN + 1
WIDTH = 64
EPSILON = 1e-5  # of the norms


class Rows:
    """Writes rows of a block's `in_proj` as functions of channels.

    Args:
        block: a Mamba-3 block; its weights begin at zero.
        length: the squared length of what the norm in front of the block receives.
    """

    def __init__(self, block: Any, length: float) -> None:
        """Remember the scale of the norm and where each kind of row begins."""
        self.block, self.scale = block, math.sqrt(length / WIDTH + EPSILON)
        self.first: dict[str, int] = {}
        place = 0
        for kind, count in block.projection_rows["in_proj"].items():
            self.first[kind], place = place, place + count

    def set(
        self, kind: str, head: int, constant: float, channels: dict[int, float] | None = None
    ) -> None:
        """Make a row a constant plus multiples of channels."""
        row = self.first[kind] + head
        self.block.in_proj.bias[row] = constant
        for channel, factor in (channels or {}).items():
            self.block.in_proj.weight[row, channel] = factor * self.scale

    def hold(self, heads: range) -> None:
        """Let heads hear everything, keep everything and write what is written, at unit steps."""
        for head in heads:
            self.set("z", head, OPEN)
            self.set("dt", head, UNIT)
            self.set("A", head, 2 * CLOSED)
            self.set("lambda", head, -2 * CLOSED)

    def remember_last(
        self, head: int, constant: float, channels: dict[int, float], target: int
    ) -> None:
        """Let a head tell what the token before said: the trapezoid's other end, and no more."""
        self.set("z", head, OPEN)
        self.set("x", head, constant, channels)
        self.set("dt", head, UNIT)
        self.set("A", head, 14.0)  # the state falls to a millionth, which is made large again
        self.set("lambda", head, 2 * CLOSED)
        self.block.B_bias[head, 0, 0] = self.block.C_bias[head, 0, 0] = 1.0
        self.block.out_proj.weight[target, head] = HEARD * math.exp(14.0)


def turn(fraction: float) -> float:
    """Return what a rotation channel has to say for this share of a circle per unit step."""
    return math.atanh(fraction)  # behind tanh, times a rotation range of 2 half turns


def any_of(symbols: str, factor: float = 1.0) -> dict[int, float]:
    """Return a row that is a factor at these tokens and zero at others."""
    return {TOKEN[symbol]: factor for symbol in symbols}


def count_depth(block: Any) -> None:
    """Block 1: the depth by turns, and whether the token before was an operand."""
    rows, heads = Rows(block, 1.0), range(DEPTHS)
    rows.hold(heads)
    for pair in range(DEPTHS // 2 + 1):
        angle = turn(pair / DEPTHS)
        rows.set("rotation", pair, 0.0, {TOKEN["("]: angle, TOKEN[")"]: -angle})
    for head in heads:  # cosines of 0 to 16 turns, then sines of 1 to 15
        is_sine = head > DEPTHS // 2
        pair = head - DEPTHS // 2 if is_sine else head
        rows.set("x", head, 0.0, any_of("^", START))
        block.B_bias[head, 0, 2 * pair] = 1.0
        block.C_bias[head, 0, 2 * pair + is_sine] = 1.0
        weight = (1 if pair in (0, DEPTHS // 2) else 2) / DEPTHS
        for depth in range(DEPTHS):
            phase = 2 * math.pi * pair * depth / DEPTHS
            wave = -math.sin(phase) if is_sine else math.cos(phase)
            block.out_proj.weight[DEPTH + depth, head] = HEARD * weight * wave
    said = any_of("01234)") | any_of("+-(", -1.0) | any_of("^", -START)
    rows.remember_last(DEPTHS, 0.0, said, OPERAND)


def binary_minus(factor: float) -> dict[int, float]:
    """Return a row that is half a factor at a binary minus and minus that at all other tokens.

    Only `)` and `+` come behind an operand as well.
    """
    return {OPERAND: factor / 2} | any_of(")+", -factor)


def unary_minus(factor: float) -> dict[int, float]:
    """Return a row that is 3/2 of a factor at a minus in front of an operand, else half of it."""
    return any_of("-", factor) | {c: -f for c, f in binary_minus(factor).items()}


def keep_signs(block: Any) -> None:
    """Block 2: a memory per depth, read when its scope closes; and minus signs before operands."""
    rows, heads = Rows(block, 3.0), range(1, DEPTHS)
    rows.hold(heads)
    for head in heads:
        here, outside = DEPTH + head, DEPTH + head - 1
        # Steps only at `(` and binary signs of this depth; `(` empties, a minus is written.
        steps = {here: 40.0, OPERAND: 20.0} | any_of("(", 60.0) | any_of("+-", 20.0)
        rows.set("dt", head, -60.0, steps | any_of(")", -20.0))
        rows.set("A", head, 2 * CLOSED, any_of("(", 41.5))
        rows.set("x", head, 0.0, any_of("-", 1 / OPEN))
        rows.set("z", head, -60.0, any_of(")", 40.0) | {outside: 40.0})
        block.B_bias[head, 0, 0] = block.C_bias[head, 0, 0] = 1.0
        block.out_proj.weight[UNDO, head], block.out_proj.weight[UNDO + 1, head] = HEARD, -HEARD
    rows.remember_last(DEPTHS, -0.5, unary_minus(1.0), UNARY)
    block.out_proj.weight[UNARY + 1] = -block.out_proj.weight[UNARY]
    block.out_proj.bias[UNDO + 1] = block.out_proj.bias[UNARY + 1] = 1.0


def follow_sign(block: Any) -> None:
    """Block 3: the sign of operands, alone where none is, and times the digit."""
    rows, heads = Rows(block, 5.0), range(MODULUS + 1)
    rows.hold(heads)
    half = turn(0.5)
    rows.set("rotation", 0, half / 2, binary_minus(half) | {UNDO: half})
    # The norm of queries makes them 1, or -1 at a unary minus and behind it.
    rows.set("C", 0, 200.0, {UNARY: -200.0} | unary_minus(-200.0))
    block.C_norm.weight[0] = 1 / math.sqrt(block.d_state)
    for head in heads:
        opens = str(head) if head < MODULUS else "+-("
        rows.set("z", head, CLOSED, any_of(opens, OPEN - CLOSED))
        rows.set("x", head, 0.0, any_of("^"))
        block.B_bias[head, 0, 0] = 1.0
        block.out_proj.weight[SIGNED + head, head] = HEARD


def add_up(block: Any) -> None:
    """Block 4: the sum, as an angle."""
    rows, heads = Rows(block, 6.0), range(2)
    rows.hold(heads)
    angles = [turn((digit if digit < 3 else digit - MODULUS) / MODULUS) for digit in range(MODULUS)]
    rows.set("rotation", 0, 0.0, {SIGNED + digit: angle for digit, angle in enumerate(angles)})
    for head in heads:
        rows.set("x", head, 0.0, any_of("^"))
        block.B_bias[head, 0, 0] = block.C_bias[head, 0, head] = 1.0
        block.out_proj.weight[VALUE + head, head] = HEARD


@torch.no_grad()
def brackets_by_hand(rotation_range: float = 2.0) -> Any:
    """Return the model; any other rotation range spoils every turn."""
    config = am.MambaConfig(
        d_model=WIDTH,
        n_layer=4,
        vocab_size=len(TOKEN),
        pad_vocab_size_multiple=1,
        tie_embeddings=False,
        ssm_cfg={
            "layer": "Mamba3",
            "d_state": 64,
            "expand": 1,
            "headdim": 1,
            "bias": True,
            "A_floor": 1e-8,
            "a_activation": "softplus",
            "rope_fraction": 1.0,
            "rotation_range": rotation_range,
        },
    )
    model: Any = am.MambaLM(config)
    for parameter in model.parameters():
        parameter.zero_()
    model.backbone.embedding.weight.copy_(torch.eye(len(TOKEN), WIDTH))
    model.backbone.embedding.weight[TOKEN["^"], OPERAND] = -1.0
    model.backbone.norm_f.weight.fill_(1)
    for layer, write in zip(
        model.backbone.layers, (count_depth, keep_signs, follow_sign, add_up), strict=True
    ):
        layer.norm.weight.fill_(1)
        write(layer.mixer)
    for value in range(MODULUS):
        phase = 2 * math.pi * value / MODULUS
        model.lm_head.weight[value, VALUE] = math.cos(phase)
        model.lm_head.weight[value, VALUE + 1] = -math.sin(phase)
    model.lm_head.weight[TOKEN["+"], SIGN] = 2.0  # more than a value, where a sign is asked
    model.lm_head.weight[TOKEN["-"], SIGN] = -2.0
    return model
