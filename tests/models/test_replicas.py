"""Replicas: DistributedDataParallel finds no unused parameter in what the configs can express."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from replica_cases import REPLICAS, Replica, build_replica
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anymamba.models import LatentConfig, LatentModel
from anymamba.nn import StackConfig

# Warnings are errors here too: torch has one for gradients of other strides than their parameter.
pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"
)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Run a group of one process; its store is this process's memory."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def two_steps(replica: Replica) -> DistributedDataParallel:
    """Run two training steps: the second one fails if the first left a parameter without one."""
    model = DistributedDataParallel(replica.model, find_unused_parameters=False)
    for _ in range(2):
        model.zero_grad()
        model(*replica.arguments, **replica.options).float().square().mean().backward()
    return model


@pytest.mark.parametrize("name", REPLICAS)
def test_no_parameter_is_unused(group: None, name: str):
    """Two steps with find_unused_parameters=False, and a gradient for all that asks for one."""
    replica = build_replica(name)
    two_steps(replica)
    weights = {n: w for n, w in replica.model.named_parameters() if w.requires_grad}
    assert weights
    assert [n for n, w in weights.items() if w.grad is None] == []


def test_an_unused_parameter_is_noticed(group: None):
    """With a parameter that no output depends on, the second step is refused."""
    stack = StackConfig(d_model=8, n_layer=1)
    net = LatentModel(LatentConfig(d_input=2, d_output=2, stack=stack))
    net.spare = nn.Parameter(torch.zeros(1))
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        two_steps(Replica(net, (torch.zeros(1, 3, 2),), {}))


@pytest.mark.slow
def test_two_processes_agree_on_every_gradient(tmp_path: Path):
    """Two replicas on two halves of a batch have the gradients of one model on the whole.

    One half is a shorter sequence, in which a custom register does not land.
    """
    script = Path(__file__).with_name("replica_cases.py")
    path = os.pathsep.join(place for place in sys.path if place)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command: list[Any] = [sys.executable, "-W", "ignore", script, tmp_path / "store"]
    started = [
        subprocess.Popen(
            [*map(str, command), str(rank)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(told)
