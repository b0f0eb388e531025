"""Half types: what stays float32, how near the results are, and that nothing overflows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from block_cases import CASES, WIDTH, build, tokens, used_cache
from laws import assert_same, error_of

HALF = (torch.bfloat16, torch.float16)
# A parameter's gradient sums signed terms of all tokens: cancellation enlarges each one's rounding.
GRADIENT_LIMIT = {torch.bfloat16: 1e-1, torch.float16: 3e-2}
SENSITIVE = {
    "mamba1": {"A_log", "D"},
    "mamba2": {"D", "init_states"},
    "mamba3": {"dt_bias", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o", "D", "init_states"},
}
UNDECAYED = {
    "mamba1": {"A_log", "D"},
    "mamba2": {"dt_bias", "A_log", "D", "init_states"},
    "mamba3": {"dt_bias", "B_bias", "C_bias", "D", "init_states"},
}


def pair(case: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return a block in `dtype` and a float32 block with exactly its parameters."""
    half, single = CASES[case](dtype=dtype), CASES[case]()
    half.load_state_dict(build(case).state_dict())
    single.load_state_dict(half.state_dict())
    return half, single


def step_bias(block: Any) -> Tensor:
    """Return the bias of the step sizes, wherever the family keeps it."""
    return block.dt_proj.bias if hasattr(block, "dt_proj") else block.dt_bias


def flat(y: Tensor, cache: Any) -> list[Tensor]:
    """Return the output and every field of the state."""
    return [y, *cache.to_tensors().values()]


def all_gradients(outputs: list[Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Return gradients of a fixed random head on every output.

    A linear head: squares of a unit quaternion have no gradient to compare.
    """
    random = torch.Generator().manual_seed(3)
    heads = [torch.randn(y.shape, generator=random) for y in outputs]
    loss = sum((y.float() * head).mean() for y, head in zip(outputs, heads, strict=True))
    return torch.autograd.grad(loss, leaves, materialize_grads=True)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", CASES)
def test_sensitive_parameters_stay_float32(case, dtype):
    """dtype= narrows the projections; decays, biases and skips keep their precision."""
    sensitive = SENSITIVE[case.partition("_")[0]]
    for name, parameter in CASES[case](dtype=dtype).named_parameters():
        assert parameter.dtype == (torch.float32 if name in sensitive else dtype), name


@pytest.mark.parametrize("case", CASES)
def test_weight_decay_tags_are_the_official_ones(case):
    """`_no_weight_decay` marks decays, step sizes, biases and skips, and nothing else."""
    block = CASES[case]()
    tagged = {n for n, p in block.named_parameters() if getattr(p, "_no_weight_decay", False)}
    present = {name for name, _ in block.named_parameters()}
    assert tagged == UNDECAYED[case.partition("_")[0]] & present


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", CASES)
def test_states_of_half_blocks_accumulate_in_float32(case, dtype):
    """Every verb returns state and rotation in float32, windows and values as activations."""
    block = CASES[case](dtype=dtype)
    u_bsd = tokens(2, 5, dtype=dtype).detach()
    _, cache = block.prefill(u_bsd)
    for state in (block.empty_cache(2), cache, block.step(u_bsd[:, 0], cache)[1]):
        for name, tensor in state.to_tensors().items():
            wide = name.startswith(("ssm", "rotation"))
            assert tensor.dtype == (torch.float32 if wide else dtype), name


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", CASES)
def test_half_blocks_are_near_float32(case, dtype):
    """Outputs, states and gradients are within half rounding of the block that rounds nothing."""
    half, single = pair(case, dtype)
    u_bsd, cache = tokens(2, 65, dtype=dtype), used_cache(half, 2, dtype)
    expected = flat(*single.prefill(u_bsd.float(), cache.to(dtype=torch.float32)))
    actual = flat(*half.prefill(u_bsd, cache))
    assert actual[0].dtype == dtype
    for want, got in zip(expected, actual, strict=True):
        assert error_of(want.detach(), got.detach()) <= 2e-2
    wanted = all_gradients(expected, [u_bsd, *single.parameters()])
    given = all_gradients(actual, [u_bsd, *half.parameters()])
    for want, got in zip(wanted, given, strict=True):
        assert error_of(want, got) <= GRADIENT_LIMIT[dtype]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", CASES)
def test_blocks_cast_afterwards_still_work(case, dtype):
    """block.to(dtype) narrows every parameter; decays and states are computed in float32 still."""
    half, single = build(case).to(dtype), CASES[case]()
    single.load_state_dict(half.state_dict())
    u_bsd = tokens(2, 33, dtype=dtype)
    expected, actual = flat(*single.prefill(u_bsd.float())), flat(*half.prefill(u_bsd))
    for want, got in zip(expected, actual, strict=True):
        assert error_of(want.detach(), got.detach()) <= 2e-2
    for gradient in all_gradients(actual, list(half.parameters())):
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", CASES)
def test_half_steps_equal_half_prefill(case, dtype):
    """Token by token and all at once round alike, up to the half type itself."""
    block = pair(case, dtype)[0].requires_grad_(False)
    u_bsd = tokens(2, 9, dtype=dtype).detach()
    expected, whole = block.prefill(u_bsd)
    cache, outputs = block.empty_cache(2), []
    for u_bd in u_bsd.unbind(1):
        outputs.append(block.step_(u_bd, cache))
    assert error_of(expected, torch.stack(outputs, 1)) <= 2e-2
    for name, tensor in whole.to_tensors().items():
        assert error_of(tensor, cache.to_tensors()[name]) <= 2e-2, name


@pytest.mark.parametrize("case", ["mamba1", "mamba2", "mamba3", "mamba3_quaternion"])
def test_slow_accumulation_is_not_lost(case):
    """Hundreds of tiny increments add up; a bfloat16 state would stop growing at 256 of them."""
    half, single = pair(case, torch.bfloat16)
    for block in (half, single):
        block.requires_grad_(False)
        step_bias(block).fill_(-8.0)  # steps of 3e-4
    u_bd = tokens(1, dtype=torch.bfloat16).detach()
    u_bsd = u_bd.unsqueeze(1).expand(1, 400, WIDTH)
    expected = single.prefill(u_bsd.float())[1]
    cache = half.empty_cache(1)
    for _ in range(400):
        half.step_(u_bd, cache)
    for name, tensor in expected.to_tensors().items():
        for got in (cache, half.prefill(u_bsd)[1]):
            assert error_of(tensor, got.to_tensors()[name]) <= 2e-2, name


@pytest.mark.parametrize("case", CASES)
def test_autocast_over_float32_blocks(case):
    """bfloat16 autocast: near float32 in every verb, float32 states, finite near gradients."""
    block, u_bsd = build(case), tokens(2, 65)
    cache = used_cache(block, 2).requires_grad_()
    leaves = [u_bsd, *block.parameters(), *cache.to_tensors().values()]
    runs = {
        "prefill": lambda: flat(*block.prefill(u_bsd, cache)),
        "step": lambda: flat(*block.step(u_bsd[:, 0], cache)),
        "forward": lambda: [block(u_bsd)],
    }
    for verb, run in runs.items():
        expected = run()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = run()
        assert actual[0].dtype == torch.bfloat16, "autocast had no effect"
        assert {x.dtype for x in actual[1:]} <= {torch.float32}
        for want, got in zip(expected, actual, strict=True):
            assert error_of(want.detach(), got.detach()) <= 2e-2, verb
        given = all_gradients(actual, leaves)
        for want, got in zip(all_gradients(expected, leaves), given, strict=True):
            assert error_of(want, got) <= GRADIENT_LIMIT[torch.bfloat16], verb


@pytest.mark.parametrize("case", CASES)
def test_autocast_reads_a_half_input(case):
    """A float32 block under autocast takes what the layer before it made: bfloat16."""
    block, u_bsd = build(case), tokens(2, 5, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_bsd = block(u_bsd)
        y_bd, _ = block.step(u_bsd[:, 0], block.empty_cache(2))
    assert y_bsd.dtype == torch.bfloat16
    assert error_of(y_bsd[:, 0].detach(), y_bd.detach()) <= 2e-2


@pytest.mark.parametrize("case", CASES)
def test_float64_blocks_are_float64_throughout(case):
    """No parameter, state or output of a float64 block is narrower, and its answers are finer."""
    double, single = CASES[case](dtype=torch.float64), build(case)
    double.load_state_dict(single.state_dict())
    assert {p.dtype for p in double.parameters()} == {torch.float64}
    u_bsd = tokens(2, 65).detach()
    expected = flat(*double.prefill(u_bsd.double()))
    assert {x.dtype for x in expected} == {torch.float64}
    for want, got in zip(expected, flat(*single.prefill(u_bsd)), strict=True):
        assert_same(want.detach(), got.detach())
    reference = flat(*double.prefill(u_bsd.double(), impl="reference"))
    for want, got in zip(reference, expected, strict=True):
        assert_same(want.detach(), got.detach())


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_extreme_steps_and_zero_inputs_stay_finite(case, dtype):
    """Huge and vanishing step sizes and decays, and zero inputs: outputs and gradients finite."""
    for dt_bias, a_log in ((15.0, 4.0), (-30.0, -20.0), (15.0, -20.0)):
        block = CASES[case](dtype=dtype)
        with torch.no_grad():
            step_bias(block).fill_(dt_bias)
            if hasattr(block, "A_log"):
                block.A_log.fill_(a_log)
        for scale in (0.0, 1.0):
            u_bsd = (scale * tokens(2, 5, dtype=dtype)).detach().requires_grad_()
            outputs = flat(*block.prefill(u_bsd)) + flat(
                *block.step(u_bsd[:, 0], block.empty_cache(2))
            )
            assert all(bool(torch.isfinite(y).all()) for y in outputs)
            for gradient in all_gradients(outputs[:1], [u_bsd, *block.parameters()]):
                assert bool(torch.isfinite(gradient).all()), (dt_bias, a_log, scale)
