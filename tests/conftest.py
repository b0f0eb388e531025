"""Test-wide habits: uninitialised memory reads as NaN, and one thread pool for the machine."""

import pytest
import torch

# Doctest would collect the conftest files of all folders as one module of that name.
collect_ignore_glob = ["conftest.py", "*/conftest.py"]


@pytest.fixture(autouse=True)
def poison_uninitialised_memory():
    """Fill `torch.empty` with NaN, so that a read before a write cannot pass unseen."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
