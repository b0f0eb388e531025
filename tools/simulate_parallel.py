"""Work out on paper what limits training on many accelerators; prints the table of the documents.

python tools/simulate_parallel.py

Every number is counted from the sizes of the model; `Machine` holds the only assumptions. What a
rank of a context-parallel line sends is also measured, in tests/test_parallel_table.py.
"""

import math
from dataclasses import dataclass

GIGA = 1e9


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is assumed of an accelerator and its wires."""

    flops: float = 400e12  # bfloat16 products as they are reached in practice, not the peak
    memory: float = 80 * GIGA
    inside: float = 400 * GIGA  # bytes per second and direction between the 8 of one machine
    outside: float = 45 * GIGA  # the same between machines
    latency_inside: float = 8e-6
    latency_outside: float = 20e-6
    per_machine: int = 8

    def wire(self, ranks: int) -> tuple[float, float]:
        """Return bandwidth and latency among as many neighbours."""
        if ranks <= self.per_machine:
            return self.inside, self.latency_inside
        return self.outside, self.latency_outside


@dataclass(frozen=True, kw_only=True)
class Model:
    """A Mamba-3 language model with MLPs."""

    d_model: int = 4096
    n_layer: int = 48
    d_intermediate: int = 8192
    d_state: int = 128
    headdim: int = 64
    expand: int = 2
    angles: int = 32
    vocabulary: int = 128256

    @property
    def heads(self) -> int:
        """Heads of a layer."""
        return self.expand * self.d_model // self.headdim

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer; vectors are left out."""
        inner = self.expand * self.d_model
        fused = 2 * inner + 2 * self.d_state + 3 * self.heads + self.angles
        return self.d_model * (fused + inner + 3 * self.d_intermediate)

    @property
    def parameters(self) -> int:
        """Parameters in all; the head is tied."""
        return self.n_layer * self.layer_parameters + self.vocabulary * self.d_model

    @property
    def token_flops(self) -> float:
        """Operations per token, forward and backward."""
        p, r = self.headdim, self.d_state
        scan = self.heads * (64 * (r + p) + 4 * p * r)
        return 3 * (2 * self.parameters + self.n_layer * scan)

    def state_bytes(self, batch: int) -> int:
        """Bytes of the states that one layer hands on: rotation, last key and value, state."""
        return sum(sum(message) for message in self.messages(batch))

    def messages(self, batch: int) -> list[list[int]]:
        """Return the bytes of a layer's three messages, all of them float32.

        Multiplier (a number per row) and rotation; key and value; decay and state.
        """
        h, p, r = self.heads, self.headdim, self.d_state
        return [
            [4 * batch, 4 * batch * h * self.angles],
            [4 * batch * h * r, 4 * batch * h * p],
            [4 * batch * h, 4 * batch * h * p * r],
        ]


def scan_rounds(ranks: int) -> int:
    """Return the rounds of an exclusive scan: a shift, and the composition of what is left."""
    return 0 if ranks < 2 else 1 + math.ceil(math.log2(max(1, ranks - 1)))


def sent_by_inner_rank(model: Model, ranks: int, batch: int) -> int:
    """Return the bytes that a rank inside a line sends per layer in a forward, at most."""
    rotation, last, state = (sum(message) for message in model.messages(batch))
    return scan_rounds(ranks) * (rotation + state) + last


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How accelerators are used."""

    dp: int
    cp: int = 1
    tp: int = 1
    length: int = 8192
    rows: int = 1  # sequences per data-parallel rank

    @property
    def size(self) -> int:
        """Accelerators in all."""
        return self.dp * self.cp * self.tp

    @property
    def name(self) -> str:
        """The axes that are used."""
        axes = [(f"fsdp {self.dp * self.cp}", True), (f"cp {self.cp}", self.cp > 1)]
        return ", ".join(name for name, used in [*axes, (f"tp {self.tp}", self.tp > 1)] if used)


@dataclass(frozen=True)
class Verdict:
    """What a step costs, in seconds and bytes per accelerator."""

    compute: float
    shards: float
    context: float
    heads: float
    exposed: float
    memory: float
    shard_bytes: float
    context_bytes: float

    @property
    def efficiency(self) -> float:
        """Share of the time that is spent computing."""
        return self.compute / (self.compute + self.exposed)

    @property
    def limit(self) -> str:
        """What costs most of what is not computing."""
        costs = {"shards": max(0.0, self.shards - self.compute), "states": self.context}
        costs["heads"] = self.heads
        worst = max(costs, key=lambda name: costs[name])
        return worst if costs[worst] > 0.02 * self.compute else "products"


def simulate(model: Model, machine: Machine, plan: Plan) -> Verdict:
    """Count one training step: FSDP2 in bfloat16 with float32 gradients, layers recomputed."""
    tokens = plan.rows * plan.length / plan.cp
    # Recomputing a layer in the backward is one more forward: 4/3 of the products.
    compute = tokens * model.token_flops * 4 / 3 / plan.tp / machine.flops
    group = plan.dp * plan.cp
    weights = model.parameters / plan.tp
    share = (group - 1) / group
    shard_bytes = share * weights * (2 + 2 + 4)
    bandwidth, latency = machine.wire(group * plan.tp)
    shards = shard_bytes / bandwidth + 3 * model.n_layer * latency * math.log2(max(2, group))
    context_bytes, context = 0.0, 0.0
    if plan.cp > 1:
        wire, delay = machine.wire(plan.cp * plan.tp)
        # Three passes hand states on: forward, recomputed forward, backward.
        each = sent_by_inner_rank(model, plan.cp, plan.rows) / plan.tp
        context_bytes = 3 * model.n_layer * each
        messages = 2 * scan_rounds(plan.cp) + 1
        context = context_bytes / wire + 3 * model.n_layer * messages * delay
    heads = 0.0
    if plan.tp > 1:
        wire, delay = machine.wire(plan.tp)
        # Mixer and MLP, in all three passes; half precision.
        sums = 2 * 3 * model.n_layer
        moved = 2 * (plan.tp - 1) / plan.tp * tokens * model.d_model * 2
        heads = sums * (moved / wire + 2 * delay)
    exposed = max(0.0, shards - compute) + context + heads
    # Weights, gradients and two moments in float32; two gathered layers; inputs of each layer; the
    # inside of one layer, about 20 widths per token.
    held = 16 * weights / group + 2 * 2 * model.layer_parameters / plan.tp
    activations = tokens * model.d_model * (2 * 2 * model.n_layer + 20 * 2 * 2 / plan.tp)
    return Verdict(
        compute, shards, context, heads, exposed, held + activations, shard_bytes, context_bytes
    )


PLANS = [
    Plan(dp=8, rows=2),
    Plan(dp=1, cp=8, length=131072),
    Plan(dp=64, rows=1),
    Plan(dp=8, cp=8, length=131072),
    Plan(dp=1, cp=64, length=1048576),
    Plan(dp=1024, rows=1),
    Plan(dp=1024, rows=2),
    Plan(dp=128, cp=8, length=131072),
    Plan(dp=16, cp=64, length=1048576),
    Plan(dp=128, cp=1, tp=8, rows=4),
]
HEAD = (
    "| ranks | plan | tokens per sequence | compute, ms | shards, GB | shards, ms | states, MB | "
    "states, ms | heads, ms | memory, GB | computing | limited by |"
)


def row(plan: Plan, verdict: Verdict) -> str:
    """Return a line of the table."""
    cells = [
        f"{plan.size}",
        plan.name,
        f"{plan.length:,}",
        f"{1e3 * verdict.compute:,.0f}",
        f"{verdict.shard_bytes / GIGA:.1f}",
        f"{1e3 * verdict.shards:,.0f}",
        f"{verdict.context_bytes / 1e6:,.0f}",
        f"{1e3 * verdict.context:.0f}",
        f"{1e3 * verdict.heads:.0f}",
        f"{verdict.memory / GIGA:.0f}",
        f"{100 * verdict.efficiency:.0f}%",
        verdict.limit,
    ]
    return f"| {' | '.join(cells)} |"


def table() -> list[str]:
    """Return the table of the documents."""
    machine, model = Machine(), Model()
    rows = [row(plan, simulate(model, machine, plan)) for plan in PLANS]
    return [HEAD, "|---" * HEAD.count(" | ") + "|---|", *rows]


def main() -> None:
    """Print the table."""
    import sys

    model = Model()
    sys.stdout.write(f"{model.parameters / GIGA:.2f} billion parameters\n")
    sys.stdout.write("\n".join(table()) + "\n")


if __name__ == "__main__":
    main()
