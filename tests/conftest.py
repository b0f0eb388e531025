"""Test-wide habits: uninitialised memory reads as NaN, and no command keeps freed memory."""

import pytest
import torch

from kernels import running

# Doctest would collect the conftest files of all folders as one module of that name.
collect_ignore_glob = ["conftest.py", "*/conftest.py"]


@pytest.fixture(autouse=True)
def poison_uninitialised_memory():
    """Fill `torch.empty` with NaN, so that a read before a write cannot pass unseen."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def dtype(request):
    """The dtype of a test marked `kernels.PRECISIONS`, with its implementation in force."""
    name, _, kind = request.param.partition(" ")
    with running(kind or "any"):
        yield getattr(torch, name)


@pytest.fixture(autouse=True)
def memory_settings(monkeypatch):
    """Return the requests of commands to keep freed memory.

    Nobody is heard: it would hold for the whole process, and the tests after this one.
    """
    asked = []
    monkeypatch.setattr("anymamba.ops.keep_freed_memory", lambda: asked.append(True))
    return asked
