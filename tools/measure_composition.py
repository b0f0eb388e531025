"""Measure what each way of composing layers costs: parameters, time and memory of a training step.

    python tools/measure_composition.py                  the table of docs/composition.md
    python tools/measure_composition.py --length 512     longer sequences

Every case is run beside what it is compared with, interleaved, and the ratio of medians is printed.
Memory is the peak of torch's allocator during forward and backward, above parameters and input.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anymamba.bench import interleaved_medians, peak_bytes
from anymamba.models import Encoder, EncoderConfig, LatentConfig, LatentModel
from anymamba.nn import (
    BidirectionalConfig,
    BidirectionalStack,
    Marker,
    MultiGate,
    RegisterConfig,
    ResidualConfig,
    Stack,
    StackConfig,
    VirtualLayers,
    count_parameters,
)

WIDTH, VOCABULARY = 128, 1000
MAMBA3 = {"layer": "Mamba3", "d_state": 64, "headdim": 32}


class Feature(NamedTuple):
    """A row of the table: what it is, what it is compared with, and what its cost grows with."""

    name: str
    example: str
    build: Callable[[], nn.Module]
    beside: str
    grows_with: str
    options: Callable[[int, int], dict[str, Any]] = lambda batch, length: {}


def causal(**options: Any) -> Stack:
    """Return four layers with something added."""
    return Stack(StackConfig(**{"d_model": WIDTH, "n_layer": 4, "ssm_cfg": MAMBA3, **options}))


def paired(**options: Any) -> BidirectionalStack:
    """Return two pairs of layers with something added."""
    return BidirectionalStack(paired_config(**options))


def paired_config(**options: Any) -> BidirectionalConfig:
    """Return the config of two pairs of layers."""
    return BidirectionalConfig(**{"d_model": WIDTH, "n_layer": 4, "ssm_cfg": MAMBA3, **options})


def on_numbers() -> LatentModel:
    """Return a model on continuous inputs around the four layers."""
    stack = StackConfig(d_model=WIDTH, n_layer=4, ssm_cfg=MAMBA3)
    return LatentModel(LatentConfig(d_input=3, d_output=1, stack=stack))


def encoder(**options: Any) -> Encoder:
    """Return an encoder around two pairs of layers."""
    return Encoder(EncoderConfig(vocab_size=VOCABULARY, stack=paired_config(), **options))


def ragged(batch: int, length: int) -> dict[str, Any]:
    """Return lengths of rows, the last one half as long as the others."""
    return {"lengths": torch.tensor([length] * (batch - 1) + [length // 2])}


BASES: dict[str, Callable[[], nn.Module]] = {
    "4 layers": causal,
    "16 virtual layers": lambda: causal(virtual=VirtualLayers(16)),
    "2 pairs": paired,
    "a pooled encoder": encoder,
}
FEATURES = [
    Feature(
        "virtual layers",
        "virtual=VirtualLayers(16)",
        lambda: causal(virtual=VirtualLayers(16)),
        "4 layers",
        "virtual over real layers; one state per virtual layer",
    ),
    Feature(
        "gradient horizon",
        "grad_horizon=4",
        lambda: causal(virtual=VirtualLayers(16), grad_horizon=4),
        "16 virtual layers",
        "forward: all layers; backward and memory: the horizon",
    ),
    Feature(
        "multi-gate residuals",
        "residual=ResidualConfig(multi_gate=MultiGate(n_stream=2))",
        lambda: causal(residual=ResidualConfig(multi_gate=MultiGate(n_stream=2))),
        "4 layers",
        "2 d + n per set of gates; n streams of s d per layer",
    ),
    Feature(
        "replaced inputs",
        "residual=ResidualConfig(skip_last=True)",
        lambda: causal(residual=ResidualConfig(skip_last=True)),
        "4 layers",
        "nothing",
    ),
    Feature(
        "registers",
        "registers=RegisterConfig(stack=[Marker.start()])",
        lambda: causal(registers=RegisterConfig(stack=[Marker.start()])),
        "4 layers",
        "d and a token per register",
    ),
    Feature(
        "MLPs",
        "d_intermediate=256",
        lambda: causal(d_intermediate=256),
        "4 layers",
        "3 d times the width rounded up to 128, and a norm, per layer",
    ),
    Feature(
        "attention layers",
        'attn_layer_idx=[3], attn_cfg={"num_heads": 4, "causal": True}',
        lambda: causal(attn_layer_idx=[3], attn_cfg={"num_heads": 4, "causal": True}),
        "4 layers",
        "in place of a Mamba layer: s² in time, a state of 2 s d",
    ),
    Feature(
        "both directions",
        "BidirectionalConfig(n_layer=4)",
        paired,
        "4 layers",
        "nothing beyond the layers",
    ),
    Feature(
        "concatenating merges",
        'merge="cat_linear"',
        lambda: paired(merge="cat_linear"),
        "2 pairs",
        "2 d² + d per pair of layers",
    ),
    Feature(
        "shared directions",
        'n_layer=2, virtual=VirtualLayers(4, "symmetric_cyclic")',
        lambda: paired(n_layer=2, virtual=VirtualLayers(4, "symmetric_cyclic")),
        "2 pairs",
        "half the layers for as many passes",
    ),
    Feature(
        "padded batches",
        "stack(x, lengths=lengths)",
        paired,
        "2 pairs",
        "two gathers per pair",
        ragged,
    ),
    Feature(
        "numbers in and out",
        "LatentConfig(d_input=3, d_output=1, stack=stack)",
        on_numbers,
        "4 layers",
        "(d_input + 1) d + (d + 1) d_output",
    ),
    Feature(
        "masked head",
        'EncoderConfig(head="masked", ...)',
        lambda: encoder(head="masked"),
        "a pooled encoder",
        "no weights, the embedding is shared; logits of the vocabulary",
    ),
]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    sizes = (given.batch, given.length)
    bases = {name: training_step(build(), *sizes) for name, build in BASES.items()}
    print("| feature | one-line example | beside | parameters | time | memory | grows with |")
    print("|---|---|---|---|---|---|---|")
    for feature in FEATURES:
        step = training_step(feature.build(), *sizes, **feature.options(*sizes))
        # Only these two take turns: what disturbs the machine then disturbs both.
        pair = {"with": step, "without": bases[feature.beside]}
        seconds = interleaved_medians(pair, repeats=given.repeats)
        time = seconds["with"] / seconds["without"]
        memory = peak_bytes(step) / peak_bytes(bases[feature.beside])
        print(f"{static_cells(feature)} | {time:.2f}x | {memory:.2f}x | {feature.grows_with} |")
    base = next(iter(bases))
    seconds = interleaved_medians({base: bases[base]}, repeats=given.repeats)
    print(
        f"\nd {WIDTH}, batch {given.batch}, {given.length} tokens, {given.threads} thread(s), "
        f"torch {torch.__version__}. {base}: {count_parameters(BASES[base]()):,} parameters, "
        f"{1e3 * seconds[base]:.0f} ms, {peak_bytes(bases[base]) / 2**20:.0f} MB."
    )
    return 0


def static_cells(feature: Feature) -> str:
    """Return the cells that need no clock: name, example, what it stands beside, parameters."""
    more = count_parameters(feature.build()) - count_parameters(BASES[feature.beside]())
    parameters = f"{more:+,}" if more else "same"
    return f"| {feature.name} | `{feature.example}` | {feature.beside} | {parameters}"


def training_step(
    model: nn.Module, batch: int, length: int, **options: Any
) -> Callable[[], object]:
    """Return a function that runs forward and backward and forgets the gradients."""
    given = inputs_of(model, batch, length)

    def step() -> None:
        y: Tensor = model(given, **options)
        y.square().mean().backward()
        model.zero_grad()

    step()
    return step


def inputs_of(model: nn.Module, batch: int, length: int) -> Tensor:
    """Return what the model takes."""
    random = torch.Generator().manual_seed(0)
    if isinstance(model, Encoder):
        return torch.randint(VOCABULARY, (batch, length), generator=random)
    width = 3 if isinstance(model, LatentModel) else WIDTH
    return torch.randn(batch, length, width, generator=random)


if __name__ == "__main__":
    sys.exit(main())
