"""Stacks keep the laws of a block: whole = pieces = steps, for every way of composing layers."""

import pytest
import torch
from stack_cases import (
    ATTENTION,
    FAMILIES,
    GATES,
    assert_agree,
    build,
    config,
    in_pieces,
    inputs,
    outcome,
    parameter_gradients,
    stepwise,
    whole,
)

from anymamba.errors import AnyMambaError, BackendError, CacheError
from anymamba.nn import GatedMLP, Layer, Mamba3, ResidualConfig, RMSNorm, Stack, VirtualLayers
from laws import assert_same, randn

COMPOSITIONS = {
    "plain": {},
    "mlp": {"d_intermediate": 16},
    "cyclic": {"virtual": VirtualLayers(5, "cyclic")},
    "stretched": {"virtual": VirtualLayers(5, "stretched"), "d_intermediate": 16},
    "skips": {"residual": ResidualConfig(skip_first=True, skip_last=True), "d_intermediate": 16},
    "gates": {"residual": GATES, "virtual": VirtualLayers(5, "cyclic")},
    "layer_norm": {"rms_norm": False, "final_norm": True},
    "horizon": {"virtual": VirtualLayers(5, [1, 0, 1, 1, 0]), "grad_horizon": 3},
    "gates_horizon": {"residual": GATES, "virtual": VirtualLayers(6), "grad_horizon": 2},
}
MIXED = {
    "n_layer": None,
    "layers": [*FAMILIES.values(), {"layer": "MHA", **ATTENTION}],
    "d_intermediate": 16,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_whole_equals_pieces_equals_steps(name, family):
    """Outputs, final states and all gradients do not depend on how the sequence is cut."""
    stack = build(config(family, **COMPOSITIONS[name]))
    x_bsd = inputs(2, 9)
    expected = outcome(stack, whole(), x_bsd)
    for way in (in_pieces(4, 5), in_pieces(3, 1, 5), stepwise()):
        assert_agree(expected, outcome(stack, way, x_bsd))
    assert_same(expected.values["y"], stack(x_bsd).detach())


@pytest.mark.parametrize("gated", [False, True])
def test_families_and_attention_mix(gated):
    """One stack may hold every family and attention, and keeps the laws."""
    residual = GATES if gated else ResidualConfig()
    stack = build(config(**MIXED, residual=residual))
    kinds = [type(layer.mixer).__name__ for layer in stack.layers]
    assert kinds == ["Mamba", "Mamba2", "Mamba3", "MHA"]
    x_bsd = inputs(2, 7)
    expected = outcome(stack, whole(), x_bsd)
    for way in (in_pieces(2, 5), stepwise()):
        got = outcome(stack, way, x_bsd)
        assert_same(expected.values["y"], got.values["y"])
        for name, grad in expected.grads.items():
            assert_same(grad, got.grads[name], "grad", name)


@pytest.mark.parametrize("name", ["plain", "stretched", "gates", "gates_horizon"])
def test_packed_sequences_do_not_meet(name):
    """cu_seqlens and seq_idx give each sequence what it would have alone."""
    stack = build(config(**COMPOSITIONS[name]))
    x_bsd = inputs(1, 9)
    alone = torch.cat([stack(x_bsd[:, :4]), stack(x_bsd[:, 4:])], 1)
    packed, cache = stack.prefill(x_bsd, cu_seqlens=torch.tensor([0, 4, 9]))
    assert_same(alone.detach(), packed.detach())
    assert cache.position_b.tolist() == [4, 5]
    labels = torch.tensor([[7] * 4 + [3] * 5])
    labelled, cache = stack.prefill(x_bsd, seq_idx=labels)
    assert_same(alone.detach(), labelled.detach())
    assert cache.position_b.tolist() == [5]


def test_the_input_stays_only_where_residuals_keep_it():
    """skip_first and skip_last drop a layer's input, but not the one its own MLP sees."""
    for skip_first, skip_last in ((True, False), (False, True), (True, True)):
        residual = ResidualConfig(skip_first=skip_first, skip_last=skip_last)
        stack = build(config(d_intermediate=16, residual=residual))
        x_bsd = inputs(2, 5)
        h_bsd = x_bsd
        for place, layer in enumerate(stack.layers):
            mixed_bsd = layer.mixer(layer.norm(h_bsd))
            delta_bsd = mixed_bsd + layer.mlp(layer.norm2(h_bsd + mixed_bsd))
            h_bsd = delta_bsd if (skip_first, skip_last)[place] else h_bsd + delta_bsd
        assert_same(h_bsd.detach(), stack(x_bsd).detach())


def test_layer_is_two_residual_branches():
    """With an MLP a layer adds two branches, without one it adds one; the norms are distinct."""
    x_bsd = inputs(2, 5)
    for hidden in (0, 16):
        stack = build(config(real=1, d_intermediate=hidden))
        layer = stack.layers[0]
        expected = x_bsd + layer.mixer(layer.norm(x_bsd))
        if hidden:
            assert layer.norm.weight is not layer.norm2.weight
            expected = expected + layer.mlp(layer.norm2(expected))
        assert_same(expected.detach(), stack(x_bsd).detach())
    with pytest.raises(ValueError, match="norm2 and mlp come together"):
        Layer(RMSNorm(8), Mamba3(8, headdim=4, d_state=8), mlp=GatedMLP(8, 16))


def test_gated_mlp_rounds_up_and_gates_with_the_second_half():
    """The hidden width is a multiple of 128, the value comes first, and rows are independent."""
    for asked, hidden in ((1264, 1280), (1536, 1536), (1, 128), (129, 256)):
        assert GatedMLP(4, asked).fc2.in_features == hidden
    torch.manual_seed(0)
    mlp = GatedMLP(4, 100, dtype=torch.float64)
    x_bsd = randn(2, 3, 4, seed=1).requires_grad_()
    value, gate = mlp.fc1(x_bsd)[..., :128], mlp.fc1(x_bsd)[..., 128:]
    y_bsd = mlp(x_bsd)
    assert_same(mlp.fc2(value * gate * gate.sigmoid()).detach(), y_bsd.detach())
    assert_same(torch.stack([mlp(x) for x in x_bsd.unbind(1)], 1).detach(), y_bsd.detach())
    (grad,) = torch.autograd.grad(y_bsd.sum(), x_bsd)
    assert bool(grad.isfinite().all() and (grad != 0).any())


@pytest.mark.parametrize("name", ["plain", "skips", "gates", "gates_horizon"])
def test_fixed_point_is_the_limit_of_steps(name):
    """step_infinite through a stack is what many equal steps converge to."""
    stack = build(config(**COMPOSITIONS[name]))
    with torch.no_grad():
        for layer in stack.layers:
            layer.mixer.dt_bias.fill_(2.0)
    x_bd = inputs(2, 1)[:, 0]
    cache = stack.empty_cache(2)
    with torch.no_grad():
        for _ in range(400):
            y_bd, cache = stack.step(x_bd, cache)
    torch.testing.assert_close(stack.step_infinite(x_bd).detach(), y_bd, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", ["mamba1", "mamba2"])
def test_families_without_a_fixed_point_say_so(family):
    """step_infinite names the first layer that has none."""
    with pytest.raises(BackendError, match="layer 0 is a Mamba"):
        build(config(family)).step_infinite(inputs(1, 1)[:, 0])


def test_step_in_place_writes_into_the_cache():
    """step_ gives what step gives, and leaves the new state in the old memory."""
    stack = build(config(virtual=VirtualLayers(4)))
    x_bd = inputs(2, 1)[:, 0]
    cache = stack.empty_cache(2)
    y_bd, new = stack.step(x_bd, cache)
    memory = cache.layers[3].ssm_bhpr.data_ptr()
    assert_same(y_bd.detach(), stack.step_(x_bd, cache))
    assert cache.layers[3].ssm_bhpr.data_ptr() == memory
    for name, tensor in new.to_tensors().items():
        assert torch.equal(tensor, cache.to_tensors()[name])


def test_step_in_place_refuses_attention():
    """Keys grow, so they cannot stay in their memory."""
    stack = build(config(**MIXED))
    with pytest.raises(BackendError, match="attention layers grow"):
        stack.step_(inputs(1, 1)[:, 0], stack.empty_cache(1))


def test_every_virtual_layer_has_its_own_state():
    """Weights are shared, states are not; another number of states is refused."""
    stack = build(config(virtual=VirtualLayers(5)))
    cache = stack.empty_cache(2)
    assert len(cache.layers) == 5
    _, cache = stack.prefill(inputs(2, 4), cache)
    assert not torch.equal(cache.layers[0].ssm_bhpr, cache.layers[2].ssm_bhpr)
    with pytest.raises(CacheError, match="the cache has 4 layers; there must be one per virtual"):
        stack.prefill(inputs(2, 4), cache._replace(layers=cache.layers[:4]))
    with pytest.raises(CacheError, match="must be a ModelCache; got NoneType"):
        stack.step(inputs(2, 1)[:, 0], None)
    with pytest.raises(CacheError, match="must be a Mamba1Cache"):
        build(config("mamba1", virtual=VirtualLayers(5))).prefill(inputs(2, 4), cache)


def test_inputs_are_checked_at_the_door():
    """A wrong width or dtype is named before any layer runs."""
    stack = build(config())
    with pytest.raises(AnyMambaError, match=r"Stack.forward: the input must have the axes"):
        stack(inputs(2, 4)[..., :5])
    with pytest.raises(AnyMambaError, match=r"Stack.step: the input is torch.float32"):
        stack.step(inputs(2, 1)[:, 0].float(), stack.empty_cache(2))


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_every_trained_parameter_gets_a_gradient(name):
    """No configuration has a parameter that asks for gradients and gets none."""
    stack = build(config(**COMPOSITIONS[name]))
    grads = parameter_gradients(stack, stack(inputs(2, 5)).square().sum())
    assert grads
    assert [name for name, grad in grads.items() if grad is None] == []


def test_half_types_keep_the_stream_in_float32():
    """Beside bfloat16 the sum of branches is not rounded from layer to layer."""
    stack = build(config(real=2, virtual=VirtualLayers(24)), dtype=torch.float32)
    x_bsd = inputs(2, 6, dtype=torch.float32)
    exact = stack(x_bsd).detach()
    half = Stack(stack.stack_config, dtype=torch.bfloat16)
    half.load_state_dict(stack.state_dict())
    y_bsd = half(x_bsd.bfloat16())
    assert y_bsd.dtype == torch.bfloat16
    assert_same(exact.bfloat16(), y_bsd.detach())
    walked = half.walk(x_bsd.bfloat16(), [None] * 24, None, lambda mixer, x, c: mixer.prefill(x, c))
    assert walked.stream.residual.dtype == torch.float32


@pytest.mark.parametrize("name", ["cyclic", "gates", "horizon", "gates_horizon"])
def test_stacks_trace_as_one_graph(name):
    """The compiler sees a single graph, with the values and gradients of the eager stack."""
    stack = build(config(**COMPOSITIONS[name]))
    compiled = torch.compile(stack, fullgraph=True, backend="eager")
    x_bsd = inputs(2, 6)
    results = [
        torch.autograd.grad(run(x).square().sum(), x)[0]
        for run in (stack, compiled)
        for x in [x_bsd.clone().requires_grad_()]
    ]
    assert_same(results[0], results[1], "grad")
