"""Submodules are called as modules: hooks see their inputs, and replacements take part."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from block_cases import CASES, WIDTH, build, tokens, used_cache
from laws import assert_same

SUBMODULES = [(case, name) for case in CASES for name, _ in build(case).named_children()]


class Adapter(nn.Module):
    """A frozen module plus a low-rank path that starts as zero, like LoRA."""

    def __init__(self, inner: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        weight = inner.weight
        size = weight.shape[1] if isinstance(inner, nn.Linear) else weight.shape[0]
        self.down = nn.Parameter(torch.randn(rank, size))
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        if isinstance(self.inner, nn.Conv1d):
            # The convolution pads on both sides; its causal part is as long as the input.
            path_vs = self.up @ self.down @ x
            y_vs = self.inner(x)
            return y_vs + nn.functional.pad(path_vs, (0, y_vs.shape[-1] - x.shape[-1]))
        return self.inner(x, *rest) + x @ self.down.T @ self.up.T


def verbs(block: Any) -> Iterator[tuple[str, Any]]:
    """Yield each way to run the block: its name and a call on (batch 2, length 6) tokens."""
    cache = used_cache(block, 2)
    yield "forward", lambda u_bsd: (block(u_bsd),)
    yield "prefill", lambda u_bsd: _flat(*block.prefill(u_bsd, cache))
    yield "step", lambda u_bsd: _flat(*block.step(u_bsd[:, 0], cache))
    yield "packed", lambda u_bsd: _flat(*_packed(block, u_bsd))
    if hasattr(block, "step_infinite"):
        yield "step_infinite", lambda u_bsd: (block.step_infinite(u_bsd[:, 0]),)


def _flat(y: Tensor, cache: Any) -> tuple[Tensor, ...]:
    return (y, *cache.to_tensors().values())


def _packed(block: Any, u_bsd: Tensor) -> tuple[Tensor, Any]:
    u_1sd = u_bsd.flatten(0, 1)[None]
    return block.prefill(u_1sd, cu_seqlens=torch.tensor([0, 5, 5, 12]))


def gradients(block: Any, outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the gradients of every parameter of the block."""
    loss = torch.stack([y.square().sum() for y in outputs]).sum()
    return list(torch.autograd.grad(loss, list(block.parameters()), materialize_grads=True))


@pytest.mark.parametrize(("case", "name"), SUBMODULES)
def test_hooks_see_every_submodule_in_every_verb(case, name):
    """A forward hook sees its input and output; results and gradients stay what they were."""
    block, u_bsd = build(case), tokens(2, 6)
    plain = {verb: run(u_bsd) for verb, run in verbs(block)}
    expected = {verb: gradients(block, outputs) for verb, outputs in plain.items()}
    seen: list[tuple[Tensor, ...]] = []
    handle = block.get_submodule(name).register_forward_hook(
        lambda module, args, output: seen.append((*args, output))
    )
    for verb, run in verbs(block):
        seen.clear()
        outputs = run(u_bsd)
        assert len(seen) == 1, f"{verb}: the hook of {name} ran {len(seen)} times"
        assert all(isinstance(x, Tensor) for x in seen[0])
        for want, got in zip(plain[verb], outputs, strict=True):
            assert_same(want.detach(), got.detach(), name=f"{verb} with a hook on {name}")
        for want, got in zip(expected[verb], gradients(block, outputs), strict=True):
            assert_same(want, got, "grad", f"{verb} with a hook on {name}")
    handle.remove()


@pytest.mark.parametrize(("case", "name"), SUBMODULES)
def test_a_hook_may_change_the_output(case, name):
    """What a hook returns is what the block goes on with, in every verb."""
    block, u_bsd = build(case), tokens(2, 6).detach()
    with torch.no_grad():
        plain = {verb: run(u_bsd)[0] for verb, run in verbs(block)}
        calls = list(verbs(block))
        block.get_submodule(name).register_forward_hook(lambda module, args, output: 2 * output)
        for verb, run in calls:
            assert not torch.allclose(plain[verb], run(u_bsd)[0]), f"{verb} ignored {name}"


@pytest.mark.parametrize(("case", "name"), SUBMODULES)
def test_replaced_submodule_takes_part_and_learns(case, name):
    """A zero adapter changes nothing, agrees across verbs once trained, and receives gradients."""
    block, u_bsd = build(case), tokens(2, 6)
    calls = {verb: run(u_bsd) for verb, run in verbs(block)}
    setattr(block, name, Adapter(block.get_submodule(name)))
    adapter = block.get_submodule(name)
    for verb, run in verbs(block):
        outputs = run(u_bsd)
        for want, got in zip(calls[verb], outputs, strict=True):
            assert_same(want.detach(), got.detach(), name=f"{verb} with {name} wrapped")
        loss = torch.stack([y.square().sum() for y in outputs]).sum()
        assert torch.autograd.grad(loss, adapter.up)[0].abs().max() > 0, verb
    with torch.no_grad():
        adapter.up.normal_()
        y_bsd, cache = block.prefill(u_bsd, used_cache(block, 2))
        state, steps = used_cache(block, 2), []
        for u_bd in u_bsd.unbind(1):
            y_bd, state = block.step(u_bd, state)
            steps.append(y_bd)
        assert not torch.allclose(y_bsd, calls["prefill"][0], rtol=1e-3)
        assert_same(y_bsd, torch.stack(steps, 1), name="steps of the adapted block")
        for field, tensor in cache.to_tensors().items():
            assert_same(tensor, state.to_tensors()[field], name=field)
        pieces = [_flat(*block.prefill(piece[None])) for piece in u_bsd.flatten(0, 1).split([5, 7])]
        packed_1sd = _packed(block, u_bsd)[0]
        assert_same(torch.cat([piece[0] for piece in pieces], 1), packed_1sd, name="packed")


def doubled(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass with a forward of its own."""
    return type("Doubled", (kind,), {"forward": lambda self, *x: 2 * kind.forward(self, *x)})


@pytest.mark.parametrize(("case", "name"), SUBMODULES)
def test_subclassed_submodule_is_called(case, name):
    """A subclass with the same parameters is not bypassed by a function of its weights."""
    block, u_bsd = build(case), tokens(2, 6).detach()
    inner = block.get_submodule(name)
    calls = list(verbs(block))
    with torch.no_grad():
        plain = {verb: run(u_bsd)[0] for verb, run in calls}
        inner.__class__ = doubled(type(inner))
        for verb, run in calls:
            assert not torch.allclose(plain[verb], run(u_bsd)[0]), f"{verb} ignored {name}"


@pytest.mark.parametrize("case", ["mamba1", "mamba2"])
def test_parametrised_convolution_follows_its_parameters(case):
    """A weight-normed convolution starts where it was and moves with its new parameters."""
    block, u_bsd = build(case), tokens(2, 6).detach()
    with torch.no_grad():
        expected = block(u_bsd)
        nn.utils.parametrizations.weight_norm(block.conv1d)
        assert_same(expected, block(u_bsd), name="weight norm at its start")
        block.conv1d.parametrizations.weight.original0.mul_(2)
        assert not torch.allclose(expected, block(u_bsd), rtol=1e-3)


@pytest.mark.parametrize("case", ["mamba1", "mamba2", "mamba3_mimo"])
def test_activation_checkpointing_keeps_values_and_gradients(case):
    """torch.utils.checkpoint around a block recomputes the same thing."""
    block, u_bsd = build(case), tokens(2, 6)
    expected = gradients(block, (block(u_bsd),))
    y_bsd = torch.utils.checkpoint.checkpoint(block, u_bsd, use_reentrant=False)
    for want, got in zip(expected, gradients(block, (y_bsd,)), strict=True):
        assert_same(want, got, "grad")


@pytest.mark.parametrize("case", CASES)
def test_only_known_submodules_exist(case):
    """The children are those that official checkpoints name: tools that walk modules find them."""
    names = {name for name, _ in build(case).named_children()}
    known = {
        "mamba1": {"in_proj", "conv1d", "x_proj", "dt_proj", "out_proj"},
        "mamba2": {"in_proj", "conv1d", "norm", "out_proj"},
        "mamba3": {"in_proj", "B_norm", "C_norm", "norm", "out_proj"},
    }[case.partition("_")[0]]
    assert {"in_proj", "out_proj"} <= names <= known
    assert build(case)(torch.zeros(1, 3, WIDTH)).shape == (1, 3, WIDTH)
