"""grad_horizon: values never change, only the top layers train, the input still does."""

import pytest
import torch
from stack_cases import GATES, assert_agree, build, config, inputs, outcome, whole
from torch import Tensor

from anymamba.bench import peak_bytes
from anymamba.errors import ConfigError
from anymamba.nn import (
    Marker,
    MultiGate,
    RegisterConfig,
    ResidualConfig,
    Stack,
    VirtualLayers,
)
from laws import assert_same

V = 6
KINDS = {"add": ResidualConfig(), "gates": GATES, "skips": ResidualConfig(skip_first=True)}


def pair(top: int, **options) -> tuple[Stack, Stack]:
    """Return a stack with a horizon and its twin without one."""
    options = {"virtual": VirtualLayers(V), **options}
    return build(config(grad_horizon=top, **options)), build(config(**options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top", [0, 1, 2, 5])
def test_values_do_not_depend_on_the_horizon(kind, top):
    """Outputs and states are the same bits for every horizon."""
    cut, full = pair(top, residual=KINDS[kind])
    x_bsd = inputs(2, 7)
    (y_bsd, cache), (expected, states) = cut.prefill(x_bsd), full.prefill(x_bsd)
    assert torch.equal(y_bsd, expected)
    for name, tensor in states.to_tensors().items():
        assert torch.equal(tensor, cache.to_tensors()[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top", [V, V + 3])
def test_a_horizon_beyond_the_bottom_is_none(kind, top):
    """All gradients are those of the untouched stack."""
    cut, full = pair(top, residual=KINDS[kind])
    x_bsd = inputs(2, 7)
    assert_agree(outcome(full, whole(), x_bsd), outcome(cut, whole(), x_bsd))


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_a_horizon_does_nothing(kind):
    """Under no_grad nothing is recorded anyway."""
    cut, full = pair(2, residual=KINDS[kind])
    x_bsd = inputs(2, 7).requires_grad_()
    with torch.no_grad():
        y_bsd = cut(x_bsd)
        assert torch.equal(y_bsd, full(x_bsd))
    assert not y_bsd.requires_grad


def test_layers_that_only_run_below_the_horizon_are_frozen():
    """Their parameters of every rank ask for no gradient, so no optimiser decays them."""
    cut, _ = pair(2, virtual=None, real=4)
    frozen = {name for name, weight in cut.named_parameters() if not weight.requires_grad}
    below = {
        name for name, _ in cut.named_parameters() if name.startswith(("layers.0", "layers.1"))
    }
    assert frozen == below
    assert {weight.dim() for name, weight in cut.named_parameters() if name in frozen} >= {1, 2, 3}
    cut(inputs(2, 5)).sum().backward()
    assert all((weight.grad is None) == (n in below) for n, weight in cut.named_parameters())


def test_gates_that_only_run_below_the_horizon_are_frozen():
    """Gates per virtual layer train above the cut only."""
    cut, _ = pair(2, residual=GATES)
    trained = {n.split(".")[1] for n, w in cut.gates.named_parameters("gates") if w.requires_grad}
    assert trained == {"4", "5"}


def test_shared_weights_learn_from_their_upper_uses_alone():
    """The gradients are those of a lower stack without a graph, and an upper one with it."""
    cut, full = pair(2, virtual=VirtualLayers(V, "cyclic"))
    lower = build(config(virtual=VirtualLayers(4, "cyclic")))
    upper = build(config(virtual=VirtualLayers(2, "cyclic")))
    for stack in (lower, upper):
        stack.load_state_dict(full.state_dict())
    x_bsd = inputs(2, 7)
    with torch.no_grad():
        h_bsd = lower(x_bsd)
    upper(h_bsd).square().sum().backward()
    cut(x_bsd).square().sum().backward()
    for (name, weight), other in zip(cut.named_parameters(), upper.parameters(), strict=True):
        assert_same(other.grad, weight.grad, "grad", name)


def test_nothing_below_the_horizon_is_recorded():
    """States below the cut carry no graph, even if the state they came from did."""
    cut, _ = pair(2)
    cache = cut.empty_cache(2).requires_grad_()
    for _ in range(2):
        _, cache = cut.prefill(inputs(2, 4).requires_grad_(), cache)
        recorded = [layer.ssm_bhpr.requires_grad for layer in cache.layers]
        assert recorded == [False] * 4 + [True] * 2


def test_layers_a_prime_does_not_reach_are_cut_off_too():
    """A state below the cut that nothing has changed does not keep its graph either."""
    registers = RegisterConfig(layers={2: [Marker.start()]})
    cut, _ = pair(1, virtual=None, real=3, registers=registers)
    _, cache = cut.prime(2, cut.empty_cache(2).requires_grad_())
    assert [layer.ssm_bhpr.requires_grad for layer in cache.layers] == [False, False, True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top", [None, V, 2, 0])
def test_the_input_trains_under_every_horizon(kind, top):
    """What makes the input gets a gradient that is not zero, also with nothing differentiated."""
    stack = build(config(virtual=VirtualLayers(V), residual=KINDS[kind], grad_horizon=top))
    x_bsd = inputs(2, 5).requires_grad_()
    (grad,) = torch.autograd.grad(stack(x_bsd).square().sum(), x_bsd)
    assert bool((grad.abs().amax(-1) > 0).all())


def silence(stack: Stack, layers: int) -> None:
    """Make the lowest layers add nothing."""
    with torch.no_grad():
        for layer in stack.layers[:layers]:
            layer.mixer.out_proj.weight.zero_()


def input_gradient(stack: Stack, x_bsd: Tensor) -> Tensor:
    """Return the gradient of a loss on all outputs with respect to the input."""
    x_bsd = x_bsd.clone().requires_grad_()
    return torch.autograd.grad(stack(x_bsd).square().sum(), x_bsd)[0]


def test_input_gradient_is_exact_over_silent_layers():
    """Where the layers below are the identity, the carried gradient is the full one."""
    cut, full = pair(1, virtual=None, real=3)
    for stack in (cut, full):
        silence(stack, 2)
    x_bsd = inputs(2, 5)
    assert_same(input_gradient(full, x_bsd), input_gradient(cut, x_bsd), "grad")


def test_input_gradient_is_exact_over_shut_gates():
    """One stream behind shut gates is the input itself, and so is its gradient."""
    shut = ResidualConfig(multi_gate=MultiGate(n_stream=1))
    cut, full = pair(1, virtual=None, real=3, residual=shut)
    for stack in (cut, full):
        with torch.no_grad():
            for place in ("0", "1"):
                stack.gates[place].b_beta.fill_(-60.0)
                stack.gates[place].w_beta.zero_()
    x_bsd = inputs(2, 5)
    assert_same(input_gradient(full, x_bsd), input_gradient(cut, x_bsd), "grad")


@pytest.mark.parametrize("kind", ["add", "gates"])
@pytest.mark.parametrize("top", [0, 1, 3])
def test_registers_below_the_horizon_train(kind, top):
    """A layer's rows get their gradient through the carry, while its weights get none."""
    registers = RegisterConfig(stack=[Marker.start()], layers={0: [Marker.custom(2)]})
    options = {"virtual": None, "real": 4, "registers": registers, "residual": KINDS[kind]}
    cut, _ = pair(top, **options)
    cut(inputs(2, 5)).square().sum().backward()
    for level in (cut.registers, cut.layer_registers["0"]):
        assert bool((level.table.grad != 0).any())
    assert all(weight.grad is None for weight in cut.layers[0].parameters())


def test_registers_over_silent_layers_have_the_exact_gradient():
    """Ghost rows in the carry give the table the gradient of full back-propagation."""
    registers = RegisterConfig(layers={0: [Marker.custom(2)], 1: [Marker.end()]})
    cut, full = pair(1, virtual=None, real=3, registers=registers)
    for stack in (cut, full):
        silence(stack, 2)
        stack(inputs(2, 5)).square().sum().backward()
    for place in ("0", "1"):
        expected = full.layer_registers[place].table.grad
        assert_same(expected, cut.layer_registers[place].table.grad, "grad")


@pytest.mark.parametrize("kind", KINDS)
def test_half_types_are_not_rounded_by_the_carry(kind):
    """In bfloat16 too the values are the same bits, and the input's gradient has its dtype."""
    options = {"virtual": VirtualLayers(V), "residual": KINDS[kind]}
    cut, full = (
        build(config(grad_horizon=top, **options), dtype=torch.bfloat16) for top in (2, None)
    )
    x_bsd = inputs(2, 5, dtype=torch.bfloat16).requires_grad_()
    y_bsd = cut(x_bsd)
    assert torch.equal(y_bsd, full(x_bsd))
    (grad,) = torch.autograd.grad(y_bsd.float().square().sum(), x_bsd)
    assert grad.dtype == torch.bfloat16
    assert bool((grad != 0).any())


def test_a_negative_horizon_is_refused():
    """Zero is the least: nothing but the carry."""
    with pytest.raises(ConfigError, match="must not be negative; got -1"):
        config(grad_horizon=-1)


@pytest.mark.parametrize("kind", ["add", "gates"])
def test_the_graph_does_not_grow_with_depth(kind):
    """What is saved for the backward is the same for 8 and for 16 virtual layers."""
    saved = []
    for virtual in (8, 16):
        gates = ResidualConfig(multi_gate=MultiGate(n_stream=2, per_virtual=False))
        residual = gates if kind == "gates" else ResidualConfig()
        stack = build(config(virtual=VirtualLayers(virtual), grad_horizon=3, residual=residual))
        kept: list[int] = []

        def keep(tensor: Tensor, kept: list[int] = kept) -> Tensor:
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            stack(inputs(2, 5))
        saved.append(sum(kept))
    assert saved[0] == saved[1] > 0


@pytest.mark.parametrize("kind", ["add", "gates"])
@pytest.mark.parametrize("trains", [False, True])
def test_forward_keeps_no_state(kind, trains):
    """The peak of a forward is the same for 8 and for 32 virtual layers: states are dropped."""
    wide = {"layer": "Mamba3", "d_state": 256, "headdim": 16, "expand": 8}
    peaks = []
    for virtual in (8, 32):
        options = {"residual": KINDS[kind], "virtual": VirtualLayers(virtual), "ssm_cfg": wide}
        stack = build(config(grad_horizon=2, **options), dtype=torch.float32)
        x_bsd = inputs(4, 4, dtype=torch.float32).requires_grad_(trains)
        state = stack.empty_cache(4).layers[0].nbytes
        with torch.set_grad_enabled(trains):
            peaks.append(peak_bytes(lambda stack=stack, x_bsd=x_bsd: stack(x_bsd)))
    assert peaks[1] - peaks[0] < state
