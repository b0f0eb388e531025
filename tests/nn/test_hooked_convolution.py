"""A hooked convolution is given tokens of the module's dtype, whatever dtype the window has."""

import torch

from anymamba.nn import Mamba2
from laws import randn


def test_a_hooked_convolution_takes_wide_windows_packed_and_dense():
    """A float32 cache beside a bfloat16 block gives the same outputs and caches either way."""
    torch.manual_seed(0)
    block = Mamba2(d_model=8, d_state=4, headdim=4, dtype=torch.bfloat16)
    seen = []
    block.conv1d.register_forward_pre_hook(lambda _module, args: seen.append(args[0].dtype))
    u_bsd = randn(1, 6, 8, seed=1, dtype=torch.bfloat16)
    cache = block.empty_cache(1).map(lambda x: randn(*x.shape, seed=2, dtype=torch.float32))
    with torch.no_grad():
        dense_y, dense = block.prefill(u_bsd, cache)
        packed_y, packed = block.prefill(u_bsd, cache, cu_seqlens=torch.tensor([0, 6]))
    assert seen == [torch.bfloat16] * 2
    assert torch.equal(dense_y, packed_y)
    for one, other in zip(dense.to_tensors().values(), packed.to_tensors().values(), strict=True):
        assert one.dtype == other.dtype == torch.float32
        torch.testing.assert_close(one, other)
