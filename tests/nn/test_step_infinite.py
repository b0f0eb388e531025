"""The fixed point of a Mamba-3 block: where its output settles when one token is fed for ever."""

import math
from typing import Any

import pytest
import torch
from blocks import Case, build, random_cache, tokens
from torch import Tensor, nn
from torch.func import functional_call

from anymamba.nn import Mamba3
from anymamba.ops import quaternion_conjugate, quaternion_to_matrix, rotate_pairs
from laws import assert_same, error_of

SIZE = {"d_model": 8, "headdim": 4, "d_state": 8, "bias": True}


def _cases() -> list[Case]:
    cases = []
    for rotation in ("complex", "quaternion"):
        for fraction in (0.0, 0.5, 1.0):
            for rank in (None, 2):
                kwargs = {**SIZE, "rotation": rotation, "rope_fraction": fraction}
                if rank is not None:
                    kwargs |= {"is_mimo": True, "mimo_rank": rank, "ngroups": 2}
                    kwargs |= {"is_outproj_norm": True, "rotation_range": 1.37}
                cases.append(Case(f"{rotation}-{fraction}-rank{rank}", Mamba3, kwargs))
    return cases


CASES = _cases()
EVERY = pytest.mark.parametrize("case", CASES, ids=str)
SLOW_DECAYS = pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6])
STEP = 0.01


def slow(
    case: Case, gap: float, dtype: torch.dtype = torch.float64, *, turning: bool = True
) -> Any:
    """Return a block whose every step decays by exp(-gap): its weights say so."""
    block = build(case._replace(kwargs=case.kwargs | {"A_floor": 1e-9}), dtype)
    dt, a, lam, turn, _ = [sum(block.split_sizes[:place]) for place in range(4, 9)]
    with torch.no_grad():
        block.in_proj.weight[dt:lam] = 0
        block.in_proj.bias[dt:a] = 0
        block.dt_bias.fill_(math.log(math.expm1(STEP)))
        # The heavy tail is 1 / (1 - x) for negative x.
        block.in_proj.bias[a:lam] = 1 - STEP / gap
        if not turning:
            block.in_proj.weight[turn:] = 0
            block.in_proj.bias[turn:] = 0
    return block


def limited(case: Case, gap: float) -> Any:
    """Return a block whose every step decays by exp(-gap): `dt_limit` and `A_floor` say so."""
    kwargs = case.kwargs | {"dt_limit": (STEP, STEP), "A_floor": gap / STEP}
    block = build(case._replace(kwargs=kwargs))
    with torch.no_grad():
        block.in_proj.bias[sum(block.split_sizes[:5]) : sum(block.split_sizes[:6])] = -1e9
    return block


def rotation_matrix(block: Any, increment: Tensor) -> Tensor:
    """Return one step's rotation P of keys as (batch, head, r, r): new key = P old key."""
    size, width = block.d_state, block.rotation.width
    eye = torch.eye(size, dtype=increment.dtype)
    if width == 0:
        return eye.expand(*increment.shape[:2], size, size)
    if block.rotation.kind == "complex":
        columns = rotate_pairs(
            eye.expand(*increment.shape[:2], size, size),
            increment.unsqueeze(2),
            block.rotation.pairing,
        )
        return columns.mT
    parts = quaternion_to_matrix(quaternion_conjugate(increment)).unbind(2)
    rest = eye[width:, width:].expand(*increment.shape[:2], size - width, size - width)
    rows = []
    for place, part in enumerate([*parts, rest]):
        before = part.new_zeros(*part.shape[:-1], 4 * place)
        after = part.new_zeros(*part.shape[:-1], size - 4 * place - part.shape[-1])
        rows.append(torch.cat([before, part, after], -1))
    return torch.cat(rows, -2)


def by_linear_solve(block: Any, u_bd: Tensor) -> Tensor:
    """Solve G (1 - alpha P) = v (gamma b + beta P^T b)^T, the recurrence in the turning frame."""
    z, x_bhp, b_bmgr, c_bmgr, coefficients, turn = block._project(u_bd)
    b_bmhr, c_bmhr = block._prepare(b_bmgr, c_bmgr)
    v_bmhp = block._values(x_bhp, "portable")
    p_bhrr = rotation_matrix(block, block.rotation.increment(turn, coefficients.dt))
    b_bhrm, c_bhrm, v_bhpm = (x.permute(0, 2, 3, 1) for x in (b_bmhr, c_bmhr, v_bmhp))
    alpha, beta, gamma = (
        x[..., None, None] for x in (coefficients.da.exp(), coefficients.beta, coefficients.gamma)
    )
    fed_bhrp = (gamma * b_bhrm + beta * (p_bhrr.mT @ b_bhrm)) @ v_bhpm.mT
    eye = torch.eye(block.d_state, dtype=u_bd.dtype)
    settled_bhrp = torch.linalg.solve((eye - alpha * p_bhrr).mT, fed_bhrp)
    y_bmhp = (settled_bhrp.mT @ c_bhrm).permute(0, 3, 1, 2)
    return block._finish(y_bmhp, v_bmhp, z)


def value_and_gradients(block: Any, run: Any, u_bd: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    u_bd = u_bd.detach().clone().requires_grad_()
    y_bd = run(block, u_bd)
    leaves = {"u": u_bd, **dict(block.named_parameters())}
    grads = torch.autograd.grad(
        (y_bd * torch.arange(1, 9, dtype=y_bd.dtype)).sum(),
        list(leaves.values()),
        materialize_grads=True,
    )
    return y_bd.detach(), dict(zip(leaves, grads, strict=True))


def _settled(block: Any, u_bd: Tensor) -> Tensor:
    return block.step_infinite(u_bd)


@EVERY
def test_equals_the_unrolled_limit(case: Case):
    """After 2000 equal tokens from any cache the output has settled, and so have gradients."""
    block = build(case)
    u_bd = tokens(block, 2, 1)[:, 0]
    cache = random_cache(block, 2)
    da_bh = block._project(u_bd)[4].da
    assert bool((2000 * da_bh).exp().max() < 1e-12)

    def unrolled(block: Any, u_bd: Tensor) -> Tensor:
        state = block.prefill(u_bd.unsqueeze(1).expand(-1, 1999, -1), cache)[1]
        return block.step(u_bd, state)[0]

    expected, expected_grads = value_and_gradients(block, unrolled, u_bd)
    actual, grads = value_and_gradients(block, _settled, u_bd)
    assert_same(expected, actual)
    for name, grad in expected_grads.items():
        # 2000 gradients of either sign were summed.
        assert error_of(grad, grads[name]) < 1e-8, name


@SLOW_DECAYS
@EVERY
def test_equals_a_linear_solve_near_alpha_one(case: Case, gap: float):
    """Where unrolling would take millions of tokens, a dense solve agrees up to its rounding."""
    for block in (slow(case, gap), slow(case, gap, turning=False), limited(case, gap)):
        u_bd = tokens(block, 2, 1)[:, 0]
        da_bh = block._project(u_bd)[4].da.detach()
        assert error_of(torch.full_like(da_bh, -gap), da_bh) < 1e-9
        expected, expected_grads = value_and_gradients(block, by_linear_solve, u_bd)
        actual, grads = value_and_gradients(block, _settled, u_bd)
        # The solve rounds 1 - alpha by 1e-16; its gradient of dt cancels once more.
        assert error_of(expected, actual) < 1e-14 / gap + 1e-12
        for name, grad in expected_grads.items():
            assert error_of(grad, grads[name]) < 1e-15 / gap**2 + 1e-10, name


@SLOW_DECAYS
@EVERY
def test_float32_loses_nothing_near_alpha_one(case: Case, gap: float):
    """The denominators do not cancel: float32 follows float64 to float32's own rounding."""
    block = slow(case, gap, torch.float32)
    exact = slow(case, gap)
    exact.load_state_dict(block.state_dict())
    u_bd = tokens(block, 2, 1)[:, 0]
    with torch.no_grad():
        expected = exact.step_infinite(u_bd.double())
        assert_same(expected, block.step_infinite(u_bd))


@EVERY
def test_gradients_equal_finite_differences(case: Case):
    """The gradients of the token and of every parameter are those of the function itself."""
    block = build(case)
    names, weights = zip(*block.named_parameters(), strict=True)

    class Settled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, u_bd: Tensor) -> Tensor:
            return self.block.step_infinite(u_bd)

    def run(u_bd: Tensor, *weights: Tensor) -> Tensor:
        named = {f"block.{name}": weight for name, weight in zip(names, weights, strict=True)}
        return functional_call(Settled(), named, (u_bd,))

    leaves = [tokens(block, 1, 1)[:, 0], *weights]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_half_types_settle_near_float32():
    """In bfloat16 the fixed point is formed in float32 and rounded at the end."""
    case = CASES[2]
    block = build(case, torch.bfloat16)
    exact = build(case)
    exact.load_state_dict(block.state_dict())
    u_bd = tokens(block, 4, 1)[:, 0]
    with torch.no_grad():
        y_bd = block.step_infinite(u_bd)
        assert y_bd.dtype == torch.bfloat16
        assert error_of(exact.step_infinite(u_bd.double()), y_bd) < 2e-2


@pytest.mark.parametrize("rotation", ["complex", "quaternion"])
def test_large_tokens_have_the_gradients_of_float64(rotation: str):
    """A token that makes some step sizes tiny still has finite and right gradients."""
    torch.manual_seed(0)
    block = Mamba3(16, d_state=8, headdim=4, rotation=rotation)
    exact = Mamba3(16, d_state=8, headdim=4, rotation=rotation, dtype=torch.float64)
    exact.load_state_dict(block.state_dict())
    u_bd = 30 * torch.randn(2, 16)
    results = []
    for module, leaf_bd in ((exact, u_bd.double()), (block, u_bd.clone())):
        y_bd = module.step_infinite(leaf_bd.requires_grad_())
        results.append((y_bd.detach(), *torch.autograd.grad(y_bd.sum(), leaf_bd)))
    (want_bd, want_grad_bd), (got_bd, got_grad_bd) = results
    assert_same(want_bd, got_bd)
    assert_same(want_grad_bd, got_grad_bd, "grad")
