"""Language models over several ranks have the loss and the gradients of one process."""

from pathlib import Path

import pytest
import torch.distributed as dist
from parallel_cases import LAYOUTS, checks

from worlds import run_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"
    ),
]

# In bfloat16: times the error of one process in bfloat16. Ranks round their shares one by one.
LIMIT = {"bfloat16": 2.0}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, dict[str, float | str]]:
    """What worlds of several sizes found."""
    script = Path(__file__).with_name("parallel_cases.py")
    return {size: run_world(script, size, tmp_path_factory.mktemp("world")) for size in LAYOUTS}


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in LAYOUTS for name in checks(size)]
)
def test_ranks_equal_one_process(found: dict[int, dict[str, float | str]], size: int, name: str):
    """Loss and gradients agree to 1e-5 in float32, and gathered weights are bit-equal."""
    error = found[size].get(name, "an earlier check broke off")
    assert not isinstance(error, str), error
    assert error <= LIMIT.get(name.partition(":")[0], 1e-5)
