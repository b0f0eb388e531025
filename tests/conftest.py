"""Test-wide habits: uninitialised memory reads as NaN, and one thread pool for the machine."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poison_uninitialised_memory():
    """Fill `torch.empty` with NaN, so that a read before a write cannot pass unseen."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
