"""Blocks in PyTorch's own machinery: compilation in one graph, export, functional transforms."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, vmap

from anymamba.ops import SsdPath
from block_cases import CASES, build, parameters_of, tokens, used_cache
from laws import assert_same


def cases(*quick: str) -> list[Any]:
    """Return all cases, those not named as slow tests: tracing takes seconds."""
    return [pytest.param(case, marks=() if case in quick else pytest.mark.slow) for case in CASES]


@pytest.fixture(autouse=True)
def forget_graphs():
    """Start and leave with an empty compile cache."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, backend: str = "eager") -> tuple[Any, CompileCounterWithBackend]:
    """Compile without permission to break the graph, and count the graphs."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter), counter


def gradients(outputs: list[Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of a fixed random head on every output."""
    random = torch.Generator().manual_seed(3)
    heads = [torch.randn(y.shape, generator=random) for y in outputs]
    loss = torch.stack([(y * head).sum() for y, head in zip(outputs, heads, strict=True)]).sum()
    return torch.autograd.grad(loss, leaves, materialize_grads=True)


def assert_equal_runs(expected: list[Tensor], actual: list[Tensor], leaves: list[Tensor]) -> None:
    """Compare outputs, and the gradients of every leaf."""
    wanted, given = gradients(expected, leaves), gradients(actual, leaves)
    for place, (want, got) in enumerate(zip(expected, actual, strict=True)):
        assert_same(want.detach(), got.detach(), name=f"output {place}")
    for place, (want, got) in enumerate(zip(wanted, given, strict=True)):
        assert_same(want, got, "grad", f"gradient {place}")


def flat(y: Tensor, cache: Any) -> list[Tensor]:
    """Return the output and every field of the state."""
    return [y, *cache.to_tensors().values()]


@pytest.mark.parametrize("case", cases("mamba1", "mamba2", "mamba3_mimo"))
def test_compiled_forward_equals_eager_in_few_graphs(case):
    """One unbroken graph serves many lengths; values and all gradients are those of eager mode."""
    block = build(case)
    fast, counter = compiled(block)
    for length in (5, 63, 64, 65):
        u_bsd = tokens(2, length, seed=length)
        leaves = [u_bsd, *block.parameters()]
        assert_equal_runs([block(u_bsd)], [fast(u_bsd)], leaves)
    assert counter.frame_count <= 3


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in ("mamba1", "mamba2") else pytest.mark.slow) for c in CASES],
)
def test_compiled_gradients_equal_eager(case):
    """Traced backward passes too (AOT): gradients of inputs, states and parameters."""
    block = build(case)
    u_bsd, cache = tokens(2, 9), used_cache(block, 2).requires_grad_()
    fast = compiled(block.prefill, "aot_eager")[0]
    leaves = [u_bsd, *cache.to_tensors().values(), *block.parameters()]
    assert_equal_runs(flat(*block.prefill(u_bsd, cache)), flat(*fast(u_bsd, cache)), leaves)


@pytest.mark.parametrize("case", cases("mamba3", "mamba3_quaternion", "mamba3_double"))
def test_compiled_prefill_equals_eager_in_few_graphs(case):
    """A piece from a state to a state compiles too, and the state carries gradients both ways."""
    block = build(case)
    fast, counter = compiled(block.prefill)
    for length in (5, 64, 65):
        u_bsd, cache = tokens(2, length, seed=length), used_cache(block, 2).requires_grad_()
        leaves = [u_bsd, *cache.to_tensors().values(), *block.parameters()]
        expected, actual = block.prefill(u_bsd, cache), fast(u_bsd, cache)
        assert type(actual[1]) is type(cache)
        assert_equal_runs(flat(*expected), flat(*actual), leaves)
    assert counter.frame_count <= 3


@pytest.mark.parametrize(
    "case", cases("mamba1", "mamba2", "mamba3", "mamba3_quaternion", "mamba3_mimo")
)
def test_compiled_step_equals_eager_in_one_graph(case):
    """Decoding compiles once: the second and third token meet the same graph."""
    block = build(case)
    fast, counter = compiled(block.step)
    cache = used_cache(block, 2).requires_grad_()
    for seed in (1, 2, 3):
        u_bd = tokens(2, seed=seed)
        leaves = [u_bd, *cache.to_tensors().values(), *block.parameters()]
        expected, actual = block.step(u_bd, cache), fast(u_bd, cache)
        assert_equal_runs(flat(*expected), flat(*actual), leaves)
        cache = expected[1].detach().requires_grad_()
    assert counter.frame_count == 1


@pytest.mark.parametrize("case", cases("mamba2")[2:])
@pytest.mark.parametrize("kind", ["minimal", "serial"])
def test_compiled_paths_equal_eager(case, kind):
    """The other algorithms compile without a break as well."""
    block, u_bsd = build(case), tokens(2, 9)
    path = getattr(SsdPath, kind)(4)
    fast, _ = compiled(lambda u_bsd: block(u_bsd, path=path))
    leaves = [u_bsd, *block.parameters()]
    assert_equal_runs([block(u_bsd, path=path)], [fast(u_bsd)], leaves)


@pytest.mark.parametrize("case", cases("mamba2"))
def test_compiled_inference_equals_eager(case):
    """Without gradients, and with a learnt state left out, the compiled verbs still agree."""
    block, u_bsd = build(case), tokens(2, 9).detach()
    with torch.no_grad():
        for want, got in zip(
            flat(*block.prefill(u_bsd)), flat(*compiled(block.prefill)[0](u_bsd)), strict=True
        ):
            assert_same(want, got)


@pytest.mark.parametrize("case", cases("mamba1", "mamba3"))
def test_compiled_packed_forward_equals_eager(case):
    """Borders are data: another packing of the same length meets the same graph."""
    block = build(case)
    fast, counter = compiled(lambda u_1sd, borders: block(u_1sd, cu_seqlens=borders))
    for borders in ([0, 4, 4, 9], [0, 1, 7, 9]):
        u_1sd, cu_seqlens = tokens(1, 9), torch.tensor(borders)
        leaves = [u_1sd, *block.parameters()]
        assert_equal_runs([block(u_1sd, cu_seqlens=cu_seqlens)], [fast(u_1sd, cu_seqlens)], leaves)
    assert counter.frame_count == 1


def test_compiled_step_refuses_a_foreign_cache():
    """The checks are part of the graph's guards: a cache that does not fit still says so."""
    block = build("mamba3")
    fast = torch.compile(block.step, backend="eager")
    with pytest.raises(ValueError, match="the cache must be a"):
        fast(tokens(2), build("mamba2").empty_cache(2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own, about torch.jit
@pytest.mark.parametrize("case", ["mamba1", "mamba2", "mamba3_quaternion"])
def test_inductor_equals_eager(case):
    """The default compiler agrees as well: forward, gradients and one decoded token."""
    block, u_bsd = build(case), tokens(2, 9)
    leaves = [u_bsd, *block.parameters()]
    assert_equal_runs([block(u_bsd)], [compiled(block, "inductor")[0](u_bsd)], leaves)
    cache = used_cache(block, 2)
    with torch.no_grad():
        expected = flat(*block.step(u_bsd[:, 0], cache))
        actual = flat(*compiled(block.step, "inductor")[0](u_bsd[:, 0], cache))
    for want, got in zip(expected, actual, strict=True):
        assert_same(want, got)


class Decoder(nn.Module):
    """A step with the state as flat tensors, which is what an exported program can carry."""

    def __init__(self, block: Any, cache_type: Any) -> None:
        super().__init__()
        self.block, self.cache_type = block, cache_type

    def forward(self, u_bd: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        y_bd, cache = self.block.step(u_bd, self.cache_type.from_tensors(state))
        return y_bd, cache.to_tensors()


@pytest.mark.parametrize("case", cases("mamba1", "mamba2_mlp", "mamba3", "mamba3_mimo_quaternion"))
def test_exported_step_equals_eager(case):
    """torch.export takes a decoder; its program runs tokens one after the other like eager mode."""
    block = build(case).requires_grad_(False)
    cache = used_cache(block, 2)
    example = (tokens(2).detach(), cache.to_tensors())
    program = torch.export.export(Decoder(block, type(cache)), example).module()
    state = cache.to_tensors()
    for seed in (4, 5):
        u_bd = tokens(2, seed=seed).detach()
        want, cache = block.step(u_bd, cache)
        got, state = program(u_bd, state)
        assert_same(want, got)
        for name, tensor in cache.to_tensors().items():
            assert_same(tensor, state[name], name=name)


@pytest.mark.parametrize("case", CASES)
def test_functional_call_and_grad_equal_modules(case):
    """Parameters may come from outside; torch.func.grad over them equals autograd."""
    block, u_bsd = build(case), tokens(2, 7).detach()
    parameters = {name: p.detach() * 1.1 for name, p in parameters_of(block).items()}

    def loss_of(given: dict[str, Tensor]) -> Tensor:
        return functional_call(block, given, (u_bsd,)).square().sum()

    actual = grad(loss_of)(parameters)
    with torch.no_grad():
        for name, p in block.named_parameters():
            p.copy_(parameters[name])
    y_bsd = block(u_bsd)
    assert_same(y_bsd.detach(), functional_call(block, parameters, (u_bsd,)))
    names = list(parameters)
    expected = torch.autograd.grad(y_bsd.square().sum(), [block.get_parameter(n) for n in names])
    for name, want in zip(names, expected, strict=True):
        assert_same(want, actual[name], "grad", name)


@pytest.mark.parametrize("case", CASES)
def test_vmap_over_inputs_equals_a_loop(case):
    """A mapped axis in front of the batch gives what a loop over it gives: forward and step."""
    block, cache = build(case).requires_grad_(False), used_cache(build(case), 2)
    u_zbsd = tokens(3, 2, 6).detach()
    assert_same(torch.stack([block(u) for u in u_zbsd]), vmap(block)(u_zbsd))

    def step(u_bd: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y_bd, new = block.step(u_bd, cache)
        return y_bd, new.to_tensors()

    y_zbd, states = vmap(step)(u_zbsd[:, :, 0])
    for place, u_bsd in enumerate(u_zbsd):
        want, new = step(u_bsd[:, 0])
        assert_same(want, y_zbd[place])
        for name, tensor in new.items():
            assert_same(tensor, states[name][place], name=name)


@pytest.mark.parametrize("case", CASES)
def test_gradients_per_sample_equal_a_loop(case):
    """vmap over grad over parameters: the gradient of each sample on its own."""
    block = build(case)
    u_zsd = tokens(3, 6).detach()
    parameters = {name: p.detach() for name, p in parameters_of(block).items()}

    def loss_of(given: dict[str, Tensor], u_sd: Tensor) -> Tensor:
        return functional_call(block, given, (u_sd.unsqueeze(0),)).square().sum()

    mapped = vmap(grad(loss_of), in_dims=(None, 0))(parameters, u_zsd)
    for place, u_sd in enumerate(u_zsd):
        for name, want in grad(loss_of)(parameters, u_sd).items():
            assert_same(want, mapped[name][place], "grad", name)


@pytest.mark.parametrize("case", ["mamba1", "mamba2", "mamba3"])
def test_vmap_over_parameters_runs_an_ensemble(case):
    """Stacked parameters and one input: each member answers as if it were alone."""
    block, other, u_bsd = build(case), CASES[case](), tokens(2, 6).detach()
    stacked = {
        name: torch.stack([p, parameters_of(other)[name]]).detach()
        for name, p in parameters_of(block).items()
    }
    y_zbsd = vmap(lambda p: functional_call(block, p, (u_bsd,)))(stacked)
    with torch.no_grad():
        assert_same(torch.stack([block(u_bsd), other(u_bsd)]), y_zbsd)
