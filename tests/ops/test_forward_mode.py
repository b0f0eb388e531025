"""Forward-mode derivatives: references and rotations have them, fast operators refuse."""

import pytest
import torch
from torch.autograd import forward_ad

from anymamba.errors import BackendError
from anymamba.nn import Mamba, Mamba2, Mamba3
from anymamba.ops import quaternion_multiply, rotate_blocks, rotate_pairs, ssd_core
from anymamba.ops.norm.blocked import RMS_NORM
from anymamba.ops.ssd.schema import SSD_CORE
from laws import assert_same, randn

# torch scripts its own forward-mode rules when the first one is used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.*:DeprecationWarning")

SIZES = {"d_state": 8, "headdim": 4}
BLOCKS = {
    "mamba1": lambda: Mamba(8, d_state=4, dtype=torch.float64),
    "mamba2": lambda: Mamba2(8, **SIZES, dtype=torch.float64),
    "complex": lambda: Mamba3(8, **SIZES, dtype=torch.float64),
    "quaternion": lambda: Mamba3(8, **SIZES, rotation="quaternion", dtype=torch.float64),
}
EVERY_BLOCK = pytest.mark.parametrize("name", BLOCKS)


def assert_tangent_is_right(run, inputs):
    """Compare <head, J tangent> with <J^T head, tangent>."""
    inputs = tuple(inputs)
    tangents = tuple(randn(*x.shape, seed=70 + place) for place, x in enumerate(inputs))
    y, forward = torch.func.jvp(run, inputs, tangents)
    head = randn(*y.shape, seed=90)
    backward = torch.func.vjp(run, *inputs)[1](head)
    want = sum((g * t).sum() for g, t in zip(backward, tangents, strict=True))
    assert_same(want, (head * forward).sum(), "grad")


@EVERY_BLOCK
def test_references_have_a_forward_mode(name):
    """impl='reference' is plain torch, so jvp and hessian work."""
    torch.manual_seed(0)
    block = BLOCKS[name]()
    u_bsd = randn(1, 3, 8, seed=1)
    assert_tangent_is_right(lambda u: block(u, impl="reference"), [u_bsd])
    hessian = torch.func.hessian(lambda u: block(u, impl="reference").square().sum())(u_bsd)
    matrix = hessian.view(24, 24)
    assert_same(matrix, matrix.T.contiguous(), "grad")


@EVERY_BLOCK
@pytest.mark.parametrize("impl", ["auto", "portable"])
def test_fast_operators_say_that_they_have_no_forward_mode(name, impl):
    """The message names the operator and the way out, for transforms and for dual numbers."""
    block = BLOCKS[name]()
    u_bsd = randn(1, 3, 8, seed=1)
    message = r"^\w+: there is no forward-mode derivative.*impl='reference'"
    with pytest.raises(BackendError, match=message):
        torch.func.jvp(lambda u: block(u, impl=impl), (u_bsd,), (u_bsd,))
    with pytest.raises(BackendError, match=message):
        torch.func.hessian(lambda u: block(u, impl=impl).sum())(u_bsd)
    with pytest.raises(BackendError, match=message), forward_ad.dual_level():
        block(forward_ad.make_dual(u_bsd, u_bsd), impl=impl)


def test_a_kernel_says_that_it_has_no_forward_mode():
    """Operators without a block refuse by their own name."""
    x = torch.ones(2, 4)
    with pytest.raises(BackendError, match="rms_norm: there is no forward-mode"):
        torch.func.jvp(lambda x: RMS_NORM(x, torch.ones(4), 1e-5, 4)[0], (x,), (x,))


@pytest.mark.parametrize("pairing", ["interleaved", "half_split"])
def test_rotation_of_pairs_has_a_forward_mode(pairing):
    """Rotations have no `impl`, and a tangent for both arguments, partial rotation included."""
    inputs = randn(2, 3, 8, seed=1), randn(3, 3, seed=2)
    assert_tangent_is_right(lambda x, angle: rotate_pairs(x, angle, pairing), inputs)


def test_quaternions_have_a_forward_mode():
    """The same for products and for blocks."""
    q = randn(3, 2, 4, seed=2)
    assert_tangent_is_right(rotate_blocks, (randn(3, 11, seed=1), q))
    assert_tangent_is_right(quaternion_multiply, (randn(3, 2, 4, seed=3), q))


def test_calls_that_nobody_differentiates_need_no_function(monkeypatch):
    """Without gradients the bodies are called as they are; dual numbers are still refused."""
    shapes = (1, 5, 1, 2, 4), (1, 5, 2), (1, 5, 1, 1, 3), (1, 5, 1, 1, 3)
    tensors = [-randn(*shape, seed=1).abs() for shape in shapes]
    want = ssd_core(*(x.clone().requires_grad_() for x in tensors)).y_bsmhp.detach()
    refused = pytest.raises(BackendError, match="no forward-mode")
    with forward_ad.dual_level(), torch.no_grad(), refused:
        ssd_core(forward_ad.make_dual(tensors[0], tensors[0]), *tensors[1:])
    monkeypatch.setattr(SSD_CORE, "function", None)
    assert torch.equal(ssd_core(*tensors).y_bsmhp, want)
