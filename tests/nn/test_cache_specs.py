"""What a cache must hold is found out once per dtype, and is never out of date."""

import copy
import pickle

import pytest
import torch

from anymamba.errors import CacheError
from anymamba.nn import Mamba, Mamba2, Mamba3

BLOCKS = {
    "Mamba": lambda: Mamba(d_model=8),
    "Mamba2": lambda: Mamba2(d_model=8, d_state=4, headdim=4, learnable_init_state=True),
    "Mamba3": lambda: Mamba3(d_model=8, d_state=4, headdim=4),
}
EVERY_BLOCK = pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)


@EVERY_BLOCK
def test_steps_make_no_empty_state(make, monkeypatch):
    """After the first step, at any batch size, a step builds no state to compare its cache with."""
    block = make()
    caches = [block.empty_cache(batch) for batch in (2, 3)]
    block.step(torch.ones(2, 8), caches[0])
    monkeypatch.setattr(block, "_fresh", None)
    for batch, cache in zip((2, 3), caches, strict=True):
        block.step(torch.ones(batch, 8), cache)


@EVERY_BLOCK
def test_a_cast_block_asks_for_its_new_dtype(make):
    """A block that was used and then cast refuses its old caches, and copies do the same."""
    block = make()
    single = block.empty_cache(1)
    block.step(torch.ones(1, 8), single)
    for used in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        used.double()
        u_bd = torch.ones(1, 8, dtype=torch.float64)
        used.step(u_bd, used.empty_cache(1))
        with pytest.raises(CacheError, match=r"must be torch\.float64"):
            used.step(u_bd, single)
    block.step(torch.ones(1, 8), single)
