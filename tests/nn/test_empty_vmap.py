"""A mapped axis without rows is served like any other."""

import pytest
import torch

from anymamba.nn import Mamba, Mamba2, Mamba3

SIZES = {"d_state": 8, "headdim": 4}
BLOCKS = {
    "mamba1": lambda: Mamba(8, d_state=4),
    "mamba2": lambda: Mamba2(8, **SIZES),
    "complex": lambda: Mamba3(8, **SIZES),
    "quaternion": lambda: Mamba3(8, **SIZES, rotation="quaternion"),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("impl", ["auto", "portable", "reference"])
def test_vmap_over_no_rows_gives_no_rows(name, impl):
    """Outputs and gradients have the shapes of any number of rows, here none."""
    block = BLOCKS[name]()
    u_nbsd = torch.zeros(0, 2, 3, 8, requires_grad=True)
    y_nbsd = torch.vmap(lambda u: block(u, impl=impl))(u_nbsd)
    assert y_nbsd.shape == u_nbsd.shape
    assert torch.autograd.grad(y_nbsd.sum(), u_nbsd)[0].shape == u_nbsd.shape
    grad_nbsd = torch.vmap(torch.func.grad(lambda u: block(u, impl=impl).sum()))(u_nbsd)
    assert grad_nbsd.shape == u_nbsd.shape
