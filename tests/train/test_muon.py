"""Muon: what happens to singular values, and that it is the Muon everybody means."""

import math

import pytest
import torch
from torch import nn

from anymamba.errors import ShapeError
from anymamba.train import Float32Muon, build_muon, orthogonalise, torch_muon_serves

CPU = torch.device("cpu")
SHAPES = [(16, 16), (48, 16), (16, 48), (1, 16), (16, 1)]


def weights(count: int = 1, shape: tuple[int, int] = (24, 16)) -> list[nn.Parameter]:
    made = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=made)) for _ in range(count)]


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=made)


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_to_about_one(shape: tuple[int, int]) -> None:
    """Directions stay, sizes go: every singular value ends near 1, whatever it was."""
    torch.manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(n, min(shape)))[0] for n in shape)
    sizes = torch.logspace(-1, 1, min(shape))
    result = left.T @ orthogonalise(left @ torch.diag(sizes) @ right.T) @ right
    got = result.diagonal()
    assert ((got > 0.6) & (got < 1.3)).all()
    assert (result - got.diag()).abs().max() < 1e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_and_its_transpose_are_treated_alike(shape: tuple[int, int]) -> None:
    """Which side is long decides only on which side the products are made."""
    update = torch.randn(shape, dtype=torch.float64)
    assert torch.allclose(orthogonalise(update).T, orthogonalise(update.T), atol=1e-12)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_size_of_a_gradient_does_not_matter(scale: float) -> None:
    """Only the direction of the momentum counts."""
    update = torch.randn(8, 12, dtype=torch.float64)
    assert torch.allclose(orthogonalise(update), orthogonalise(scale * update), atol=1e-9)


def test_a_gradient_of_zero_moves_nothing_but_the_decay() -> None:
    """Zero divided by its own norm stays zero; the decay takes the plain learning rate."""
    (weight,) = weights()
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    Float32Muon([weight], lr=0.5, weight_decay=0.1).step()
    assert torch.equal(before * (1 - 0.5 * 0.1), weight)


def test_an_update_is_as_large_as_one_of_adamw() -> None:
    """The root mean square of a step is about 0.2 learning rates, whatever the shape."""
    for shape in [(16, 16), (64, 16), (16, 128)]:
        (weight,) = weights(shape=shape)
        before = weight.detach().clone()
        give_gradients([weight], 3)
        Float32Muon([weight], lr=0.01).step()
        size = (weight - before).square().mean().sqrt().item()
        assert 0.15 * 0.01 < size < 0.25 * 0.01


def test_momentum_looks_ahead() -> None:
    """The second step goes along (1 - mu) g2 + mu m2, with m2 = (1 - mu) (mu g1 + g2)."""
    (weight,) = weights()
    optimizer = Float32Muon([weight], lr=0.1)
    give_gradients([weight], 1)
    first = weight.grad.clone()
    optimizer.step()
    before = weight.detach().clone()
    give_gradients([weight], 2)
    optimizer.step()
    momentum = 0.05 * (0.95 * first + weight.grad)
    expected = orthogonalise(0.05 * weight.grad + 0.95 * momentum)
    reach = 0.1 * 0.2 * math.sqrt(24)
    assert torch.allclose(before - reach * expected, weight, atol=1e-6)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_ours_is_the_muon_of_torch(shape: tuple[int, int]) -> None:
    """Three steps of both end at the same place, up to the bfloat16 of torch's products."""
    (ours,), (theirs,) = weights(shape=shape), weights(shape=shape)
    start = ours.detach().clone()
    mine = Float32Muon([ours], lr=0.02, weight_decay=0.1)
    other = torch.optim.Muon(
        [theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for seed in range(3):
        give_gradients([ours], seed)
        give_gradients([theirs], seed)
        mine.step()
        other.step()
        assert torch.equal(
            mine.state[ours]["momentum_buffer"], other.state[theirs]["momentum_buffer"]
        )
    # bfloat16 keeps 8 bits: 2^-9 per rounding, grown by 15 products and the steep polynomial.
    assert (ours - theirs).norm() < 0.03 * (ours - start).norm()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
def test_torch_serves_where_bfloat16_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AVX-512 torch's own class is used, with AVX2 ours, and both take the same groups."""
    group = {"lr": 0.1, "weight_decay": 0.2}
    for capability, kind in [("AVX512", torch.optim.Muon), ("AVX2", Float32Muon)]:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        optimizer = build_muon([{"params": weights(), **group}], CPU)
        assert type(optimizer) is kind
        assert group.items() <= optimizer.param_groups[0].items()


def test_ours_serves_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a torch older than 2.9 nothing has to be installed."""
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not torch_muon_serves(CPU)
    assert type(build_muon([{"params": weights(), "lr": 0.1}], CPU)) is Float32Muon


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_keep_their_dtype(dtype: torch.dtype) -> None:
    """A float64 matrix is float64 throughout; a half one is moved, and stays half."""
    weight = nn.Parameter(torch.eye(4, dtype=dtype))
    weight.grad = torch.randn(4, 4).to(dtype)
    before = weight.detach().clone()
    Float32Muon([weight], lr=0.1).step()
    assert weight.dtype == dtype
    assert not torch.equal(before, weight)
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert orthogonalise(before).dtype == wanted


def test_rejects_what_is_no_matrix() -> None:
    """A vector has no singular values to speak of."""
    with pytest.raises(ShapeError, match=r"must be matrices; got shape \(3,\)"):
        Float32Muon([nn.Parameter(torch.zeros(3))])
