"""Caches that are written to files, and what it means that one came back."""

from pathlib import Path

import torch
from torch import Tensor

from anymamba.io import save_state
from anymamba.nn import (
    KVCache,
    Mamba1Cache,
    Mamba2Cache,
    Mamba3DoubleSsdCache,
    Mamba3SingleSsdCache,
    ModelCache,
    RotationState,
)
from laws import randn

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def make(kind: str = "mamba2", dtype: torch.dtype = torch.float32, batch: int = 2):
    """Return a cache of small odd sizes whose state is wider than `dtype`, if that is a half."""
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    ssm_bhpr = randn(batch, 3, 5, 4, seed=1, dtype=wide)
    keys = randn(batch, 2, 3, 4, seed=2, dtype=dtype), randn(batch, 3, 5, seed=3, dtype=dtype)
    angles = RotationState(angle_bha=randn(batch, 3, 1, seed=4, dtype=wide))
    quaternions = RotationState(quaternion_bhj4=randn(batch, 3, 1, 4, seed=5, dtype=wide))
    return {
        "mamba1": lambda: Mamba1Cache(
            randn(batch, 7, 4, seed=6, dtype=dtype), randn(batch, 7, 3, seed=7, dtype=wide)
        ),
        "mamba2": lambda: Mamba2Cache(randn(batch, 9, 4, seed=8, dtype=dtype), ssm_bhpr),
        "single": lambda: Mamba3SingleSsdCache(ssm_bhpr, *keys, angles),
        "double": lambda: Mamba3DoubleSsdCache(ssm_bhpr, *keys, quaternions),
        "attention": lambda: KVCache(
            randn(batch, 3, 5, 4, seed=9, dtype=dtype),
            randn(batch, 3, 5, 4, seed=10, dtype=dtype),
            torch.arange(batch),
        ),
        "attention, convolved, empty": lambda: KVCache(
            torch.zeros(batch, 3, 0, 4, dtype=dtype),
            torch.zeros(batch, 3, 0, 4, dtype=dtype),
            torch.zeros(batch, dtype=torch.int64),
            randn(batch, 9, 4, seed=11, dtype=dtype),
        ),
        "model": lambda: ModelCache(
            tuple(make(kind, dtype, batch) for kind in KINDS[:6]), torch.arange(batch) + 2**40
        ),
    }[kind]()


KINDS = [
    "mamba1",
    "mamba2",
    "single",
    "double",
    "attention",
    "attention, convolved, empty",
    "model",
]


def same_bits(expected: Tensor, actual: Tensor) -> bool:
    bits = BITS[expected.element_size()]
    return expected.dtype == actual.dtype and torch.equal(expected.view(bits), actual.view(bits))


def assert_same_cache(expected, actual):
    assert type(expected) is type(actual)
    want, got = expected.to_tensors(), actual.to_tensors()
    assert list(want) == list(got)
    for name, tensor in want.items():
        assert same_bits(tensor.detach().contiguous(), got[name]), name


def saved_state(tmp_path: Path) -> Path:
    """Return a file with a Mamba-2 cache; a fixture of those who want one."""
    file = tmp_path / "talk.state"
    save_state(make(), file)
    return file
