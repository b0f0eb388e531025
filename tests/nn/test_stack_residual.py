"""Multi-gate residuals: the formulas, the order of streams, and which parameters exist."""

import math

import pytest
import torch
from stack_cases import WIDTH, build, config, inputs, parameter_gradients
from torch import Tensor

from anymamba.errors import ConfigError
from anymamba.nn import (
    MultiGate,
    MultiGateResidual,
    ResidualConfig,
    VirtualLayers,
    depth_init_bias,
)
from laws import assert_same, randn


def gates(n_stream: int = 3, **options) -> MultiGateResidual:
    """Return gates with random queries."""
    module = MultiGateResidual(MultiGate(n_stream=n_stream, **options), WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for place, weight in enumerate(module.parameters()):
            weight.add_(randn(*weight.shape, seed=place))
    return module


def by_hand(module: MultiGateResidual, added: Tensor, streams: list[Tensor]):
    """Return the pool and the streams, one token at a time, from the definition."""

    def score(stream: Tensor, query: Tensor) -> Tensor:
        rms = (stream.square().sum() / WIDTH + 1e-5).sqrt()
        return stream.dot(query) / math.sqrt(WIDTH) / rms

    if len(streams) < module.n_stream:
        streams = [*streams, added]
    else:
        betas = [
            torch.sigmoid(score(stream, module.w_beta) + bias)
            for stream, bias in zip(streams, module.b_beta, strict=True)
        ]
        streams = [(1 - b) * s + b * added for b, s in zip(betas, streams, strict=True)]
    weights = torch.stack([score(stream, module.w_alpha) for stream in streams]).exp()
    pooled = sum(w * s for w, s in zip(weights / weights.sum(), streams, strict=True))
    return pooled, streams


@pytest.mark.parametrize("count", [1, 2, 3])
def test_gates_follow_the_definition(count):
    """Collecting and mixing are the formulas of the module, token by token."""
    module = gates(3)
    added_bsd = inputs(2, 4)
    streams = randn(2, 4, count, WIDTH, seed=7)
    pooled_bsd, after = module(added_bsd, streams)
    for b in range(2):
        for s in range(4):
            expected, expected_streams = by_hand(
                module, added_bsd[b, s], list(streams[b, s].unbind())
            )
            assert_same(expected.detach(), pooled_bsd[b, s].detach())
            assert_same(torch.stack(expected_streams).detach(), after[b, s].detach())
    row, row_streams = module(added_bsd[:, 2], streams[:, 2])
    assert_same(pooled_bsd[:, 2].detach(), row.detach())
    assert_same(after[:, 2].detach(), row_streams.detach())


def test_zero_queries_give_means():
    """Fresh gates with bias 0 meet each stream half-way and pool to the mean."""
    module = MultiGateResidual(MultiGate(n_stream=2), WIDTH, dtype=torch.float64)
    added_bsd, streams = inputs(2, 3), randn(2, 3, 2, WIDTH, seed=3)
    pooled_bsd, after = module(added_bsd, streams)
    assert_same((streams + added_bsd.unsqueeze(2)) / 2, after.detach())
    assert_same(after.mean(2).detach(), pooled_bsd.detach())


def test_a_row_in_all_streams_is_its_own_pool():
    """Equal streams have equal weights, so registers pass the pool unchanged."""
    row = inputs(1, 1)[:, 0]
    assert_same(row, gates(4).pool(row.unsqueeze(1).expand(1, 4, WIDTH)).detach())


def test_biases_are_a_ramp():
    """b_beta starts at init_bias and grows by init_bias_step."""
    config_ = MultiGate(n_stream=4, init_bias=-2.0, init_bias_step=0.5)
    assert MultiGateResidual(config_, WIDTH).b_beta.tolist() == [-2.0, -1.5, -1.0, -0.5]


def test_stack_collects_then_mixes():
    """The stack is the loop of the definition; n copies of the input would be another model."""
    stack = build(
        config(virtual=VirtualLayers(5), residual=ResidualConfig(multi_gate=MultiGate(n_stream=3)))
    )
    x_bsd = inputs(2, 5)
    results = []
    for streams in (x_bsd.unsqueeze(2), x_bsd.unsqueeze(2).expand(-1, -1, 3, -1)):
        h_bsd = x_bsd
        for v, real in enumerate(stack.schedule):
            layer = stack.layers[real]
            added_bsd = layer.mixer(layer.norm(h_bsd))
            if hasattr(stack.gates[str(v)], "w_beta") or streams.shape[2] < 3:
                h_bsd, streams = stack.gates[str(v)](added_bsd, streams)
        results.append(h_bsd.detach())
    y_bsd = stack(x_bsd).detach()
    assert_same(results[0], y_bsd)
    assert float((results[1] - y_bsd).abs().max()) > 1e-3


def test_replaced_inputs_start_the_streams_again():
    """skip_first drops the input's stream; skip_last hands the last branch out alone."""
    residual = ResidualConfig(multi_gate=MultiGate(n_stream=2), skip_first=True, skip_last=True)
    stack = build(config(virtual=VirtualLayers(4), residual=residual))
    x_bsd = inputs(2, 5)
    branch = [stack.layers[r] for r in stack.schedule]

    def run(layer, h_bsd: Tensor) -> Tensor:
        return layer.mixer(layer.norm(h_bsd))

    h_bsd = run(branch[0], x_bsd)
    streams = h_bsd.unsqueeze(2)
    for v in (1, 2):
        h_bsd, streams = stack.gates[str(v)](run(branch[v], h_bsd), streams)
    assert_same(run(branch[3], h_bsd).detach(), stack(x_bsd).detach())
    assert list(stack.gates) == ["1", "2"]


@pytest.mark.parametrize("per_virtual", [True, False])
@pytest.mark.parametrize("n_stream", [1, 2, 4, 6])
@pytest.mark.parametrize("skips", [False, True])
def test_gates_have_no_idle_parameter(n_stream, per_virtual, skips):
    """Whatever the number of streams, each parameter that exists gets a gradient."""
    kind = MultiGate(n_stream=n_stream, per_virtual=per_virtual)
    residual = ResidualConfig(multi_gate=kind, skip_first=skips)
    stack = build(config(virtual=VirtualLayers(6), residual=residual))
    assert len(stack.gates) == ((6 - skips) if per_virtual else 2)
    grads = parameter_gradients(stack, stack(inputs(2, 5)).square().sum())
    idle = [name for name, grad in grads.items() if grad is None or not bool((grad != 0).any())]
    assert idle == []


def test_gates_above_the_horizon_that_no_layer_uses_are_frozen():
    """A last layer that drops its input uses no gates, not even those it shares."""
    kind = MultiGate(n_stream=2, per_virtual=False)
    residual = ResidualConfig(multi_gate=kind, skip_last=True)
    stack = build(config(virtual=VirtualLayers(4), residual=residual, grad_horizon=1))
    assert not any(weight.requires_grad for weight in stack.gates.parameters())
    grads = parameter_gradients(stack, stack(inputs(2, 5)).square().sum())
    assert None not in grads.values()


def test_depth_bias():
    """The published value, and a refusal where the logarithm has none."""
    assert round(depth_init_bias(13, 4), 4) == -2.5329
    with pytest.raises(ConfigError, match="too few for 9 streams"):
        depth_init_bias(1, 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multi_gate": MultiGate(n_stream=4)}, "2 layers .* at most 3 streams; got n_stream=4"),
        (
            {"multi_gate": MultiGate(n_stream=1), "skip_first": True, "skip_last": True},
            "needs a layer that keeps its input",
        ),
    ],
)
def test_gates_that_could_not_work_are_refused(options, message):
    """Streams that are never filled, or gates that no layer uses."""
    with pytest.raises(ConfigError, match=message):
        config(residual=ResidualConfig(**options))
    with pytest.raises(ConfigError, match="n_stream must be positive"):
        MultiGate(n_stream=0)


def test_gates_keep_streams_in_float32_beside_half_types():
    """A stream that is mixed many times is not rounded each time."""
    residual = ResidualConfig(multi_gate=MultiGate(n_stream=2))
    stack = build(config(virtual=VirtualLayers(4), residual=residual), dtype=torch.bfloat16)
    x_bsd = inputs(2, 5, dtype=torch.bfloat16)
    walked = stack.walk(x_bsd, [None] * 4, None, lambda mixer, x, c: mixer.prefill(x, c))
    assert walked.stream.streams.dtype == torch.float32
    assert stack(x_bsd).dtype == torch.bfloat16
