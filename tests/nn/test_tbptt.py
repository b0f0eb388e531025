"""Long sequences in windows: state carried on, gradients cut where the user cuts them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from block_cases import CASES, WIDTH, build, tokens, used_cache
from laws import assert_same

WINDOW = 7


def train_in_windows(block: Any, u_bsd: Tensor, target_bsd: Tensor) -> list[float]:
    """Run truncated back-propagation through time as `docs/blocks.md` shows it."""
    losses, cache = [], None
    for u_window, target in zip(u_bsd.split(WINDOW, 1), target_bsd.split(WINDOW, 1), strict=True):
        y_window, cache = block.prefill(u_window, cache)
        loss = (y_window - target).square().sum()
        loss.backward()
        cache = cache.detach()
        losses.append(loss.item())
    return losses


def window_gradients(block: Any, u_bsd: Tensor, target_bsd: Tensor) -> list[Tensor]:
    """Compute what truncation means: each window differentiated alone, from a constant state."""
    total = [torch.zeros_like(p) for p in block.parameters()]
    for start in range(0, u_bsd.shape[1], WINDOW):
        stop = start + WINDOW
        cache = None
        if start > 0:
            with torch.no_grad():
                cache = block.prefill(u_bsd[:, :start], impl="reference")[1]
        y_bsd, _ = block.prefill(u_bsd[:, start:stop], cache, impl="reference")
        loss = (y_bsd - target_bsd[:, start:stop]).square().sum()
        grads = torch.autograd.grad(loss, list(block.parameters()), materialize_grads=True)
        total = [before + grad for before, grad in zip(total, grads, strict=True)]
    return total


@pytest.mark.parametrize("case", CASES)
def test_windows_have_the_loss_of_the_whole(case):
    """The carried state makes the windows' losses those of one long forward, at any cut."""
    block, u_bsd, target_bsd = build(case), tokens(2, 24).detach(), tokens(2, 24, seed=8).detach()
    with torch.no_grad():
        y_bsd = block(u_bsd)
    whole = (y_bsd - target_bsd).square().sum()
    losses = train_in_windows(block, u_bsd, target_bsd)
    assert len(losses) == 4  # 7 + 7 + 7 + 3
    assert_same(whole, torch.tensor(losses).sum())


@pytest.mark.parametrize("case", CASES)
def test_gradients_stop_at_the_window(case):
    """Accumulated gradients are the sum of each window's own, the state before it a constant."""
    block, u_bsd, target_bsd = build(case), tokens(2, 24).detach(), tokens(2, 24, seed=8).detach()
    expected = window_gradients(copy.deepcopy(block), u_bsd, target_bsd)
    train_in_windows(block, u_bsd, target_bsd)
    for (name, parameter), want in zip(block.named_parameters(), expected, strict=True):
        given = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_same(want, given, "grad", name)


@pytest.mark.parametrize("case", CASES)
def test_detached_state_hides_the_past_and_a_kept_one_shows_it(case):
    """Window 2 sends a gradient into window 1 through the state, unless the state is detached."""
    block = build(case)
    first_bsd, second_bsd = tokens(2, 9), tokens(2, 5, seed=4)
    _, cache = block.prefill(first_bsd)
    for state, reaches in ((cache, True), (cache.detach(), False)):
        loss = block.prefill(second_bsd, state)[0].square().sum()
        grad = torch.autograd.grad(loss, first_bsd, allow_unused=True, retain_graph=True)[0]
        assert (grad is not None and bool(grad.abs().max() > 0)) is reaches


@pytest.mark.parametrize("case", CASES)
def test_windows_with_a_kept_state_have_the_gradients_of_the_whole(case):
    """Without detach, pieces of length 1, 8 and 15 give every gradient of one forward."""
    block, u_bsd, head_bsd = build(case), tokens(2, 24), tokens(2, 24, seed=8).detach()
    leaves = [u_bsd, *block.parameters()]
    expected = torch.autograd.grad((block(u_bsd) * head_bsd).sum(), leaves)
    cache, outputs = None, []
    for piece in u_bsd.split([1, 8, 15], 1):
        y_bsd, cache = block.prefill(piece, cache)
        outputs.append(y_bsd)
    actual = torch.autograd.grad((torch.cat(outputs, 1) * head_bsd).sum(), leaves)
    for want, got in zip(expected, actual, strict=True):
        assert_same(want, got, "grad")


@pytest.mark.parametrize("case", CASES)
def test_a_returned_state_owns_its_memory(case):
    """No field is a view into a longer tensor: a stream of any length needs constant memory."""
    block = build(case).requires_grad_(False)
    u_bsd = tokens(2, 40).detach()
    borders = torch.tensor([0, 11, 11, 40])
    prefilled = block.prefill(u_bsd, used_cache(block, 2))[1]
    states = [
        prefilled,
        block.prefill(u_bsd[:1])[1],
        block.step(u_bsd[:, 0], prefilled)[1],
        block.step(u_bsd[:1, 0], block.empty_cache(1))[1],
        block.prefill(u_bsd[:1], cu_seqlens=borders)[1],
        block.prefill(u_bsd, seq_idx=torch.arange(40).expand(2, 40) // 9)[1],
    ]
    if hasattr(block, "conv1d"):
        block.conv1d.register_forward_hook(lambda module, args, output: None)
        states += [block.prefill(u_bsd)[1], block.step(u_bsd[:, 0], prefilled)[1]]
    for place, state in enumerate(states):
        for name, tensor in state.to_tensors().items():
            held = tensor.untyped_storage().nbytes()
            assert held == tensor.numel() * tensor.element_size(), (place, name)
            assert tensor.is_contiguous(), (place, name)
    assert prefilled.nbytes == sum(
        t.untyped_storage().nbytes() for t in prefilled.to_tensors().values()
    )


@pytest.mark.parametrize("case", CASES)
def test_fork_continues_independently(case):
    """A clone and its origin can be stepped in place, each on its own tokens."""
    block = build(case).requires_grad_(False)
    cache = used_cache(block, 2)
    fork, u_bd, other_bd = cache.clone(), tokens(2, seed=3).detach(), tokens(2, seed=4).detach()
    expected = [block.step(u_bd, cache), block.step(other_bd, cache)]
    y_bd, other = block.step_(u_bd, cache), block.step_(other_bd, fork)
    for (want, state), got, mine in zip(expected, (y_bd, other), (cache, fork), strict=True):
        assert torch.equal(want, got)
        for name, tensor in state.to_tensors().items():
            assert torch.equal(tensor, mine.to_tensors()[name]), name


@pytest.mark.parametrize("case", CASES)
def test_copied_and_reloaded_blocks_answer_alike(case, tmp_path):
    """deepcopy, and weights through a file into a fresh block, change nothing."""
    block, u_bsd = build(case), tokens(2, 5).detach()
    torch.save(block.state_dict(), tmp_path / "weights.pt")
    loaded = CASES[case]()
    loaded.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True), strict=True)
    with torch.no_grad():
        for twin in (copy.deepcopy(block), loaded):
            assert torch.equal(block(u_bsd), twin(u_bsd))


def test_training_in_windows_learns():
    """Six lines of truncated back-propagation reduce the loss of a task that needs memory."""
    torch.manual_seed(0)
    block = build("mamba3")
    u_bsd = torch.randn(4, 28, WIDTH)
    target_bsd = torch.roll(u_bsd, 1, 1)
    target_bsd[:, 0] = 0
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2, weight_decay=0.0)
    history = []
    for _ in range(30):
        history.append(sum(train_in_windows(block, u_bsd, target_bsd)))
        optimizer.step()
        optimizer.zero_grad()
    assert history[-1] < 0.8 * history[0]
