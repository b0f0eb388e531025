"""Context parallelism: a sequence on several ranks is the sequence on one."""

from pathlib import Path

import pytest
import torch.distributed as dist
from context_cases import CHECKS

from worlds import run_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"
    ),
]

# float64 but for the cases that say so; errors are relative to each tensor's largest magnitude.
LIMIT = {"float64": 1e-10, "float32": 1e-5}


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def found(request, tmp_path_factory) -> dict[str, float | str]:
    """What a world of this many ranks found, each check run once."""
    script = Path(__file__).with_name("context_cases.py")
    return run_world(script, request.param, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("name", CHECKS)
def test_shards_equal_the_whole(found: dict[str, float | str], name: str):
    """Values, states after each shard and all gradients equal those of one process.

    The last checks: no message grows with the length, and what cannot be shared is refused.
    """
    assert name in found, (
        f"an earlier check broke off: {[x for x in found.values() if isinstance(x, str)]}"
    )
    error = found[name]
    assert not isinstance(error, str), error
    assert error <= LIMIT["float32" if "float32" in name else "float64"]
