"""Memory in large pages: results of kernels, and weights with the same values as before.

And freed memory that stays.
"""

import copy
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anymamba.ops import copy_to_large_pages, keep_freed_memory
from anymamba.ops.native import new_tensor

LARGE_PAGE = 2 << 20
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
has_large_pages = pytest.mark.skipif(
    not SWITCH.is_file() or "[never]" in SWITCH.read_text(encoding="utf-8"),
    reason="this system has no large pages",
)


def mapping_of(tensor: Tensor) -> dict[str, list[str]]:
    """Return what the system tells about the memory around the middle of a tensor."""
    address, is_inside, found = tensor.data_ptr() + tensor.nbytes // 2, False, {}
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, stop = (int(border, 16) for border in first.split("-"))
            is_inside = start <= address < stop
        elif is_inside:
            found[first] = rest
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(3, 5), (1500, 1400), (0, 4)])
def test_a_copy_has_the_same_values_in_memory_of_its_own(dtype, shape):
    """Small and large, whatever the strides of the original."""
    original = torch.randint(-99, 99, shape[::-1]).to(dtype).T
    copied = copy_to_large_pages(original)
    assert copied.is_contiguous()
    assert (copied.shape, copied.dtype) == (original.shape, dtype)
    assert torch.equal(original, copied)
    kept = copied.clone()
    original.zero_()
    assert torch.equal(kept, copied)


def test_a_copy_may_be_written_widened_and_copied():
    """It is a tensor like any other, and outlives what it was made from."""
    copied = copy_to_large_pages(torch.ones(2**20), torch.float64)
    copied.mul_(2)
    assert torch.equal(torch.full((2**20,), 2.0, dtype=torch.float64), copy.deepcopy(copied))


@has_large_pages
def test_a_copy_asks_for_large_pages():
    """All but the part that fills no whole page; a system short of them gives small ones."""
    copied = copy_to_large_pages(torch.ones(5 * LARGE_PAGE // 8))
    assert copied.data_ptr() % LARGE_PAGE == 0
    mapping = mapping_of(copied)
    assert "hg" in mapping["VmFlags:"]
    assert int(mapping["AnonHugePages:"][0]) in (0, 2 * LARGE_PAGE >> 10)


@has_large_pages
def test_large_results_lie_in_large_pages():
    """Memory that a kernel fills for the first time costs one fault per large page."""
    torch.use_deterministic_algorithms(False)  # poisoning would fill it before it is advised
    tensor = new_tensor(torch.zeros(1), (64 << 20,), torch.uint8)
    tensor.fill_(1)
    assert "hg" in mapping_of(tensor)["VmFlags:"]
    # A system short of them gives small ones, to everybody.
    given = int(mapping_of(copy_to_large_pages(tensor))["AnonHugePages:"][0])
    assert int(mapping_of(tensor)["AnonHugePages:"][0]) >= min(32 << 10, given // 2)


@has_large_pages
def test_results_of_a_few_megabytes_ask_for_large_pages():
    """Memory of the heap may have been used before, so only the wish is certain."""
    tensor = new_tensor(torch.zeros(1), (5 << 20,), torch.uint8)
    assert "hg" in mapping_of(tensor)["VmFlags:"]


RESIDENT_AFTER_A_LARGE_TENSOR = """
import sys, torch
from pathlib import Path
from anymamba.ops import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("not agreed")
def resident():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])
before = resident()
for _ in range(2):  # the C library learns from the first large block that it frees
    torch.ones(64 << 18)
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
@pytest.mark.parametrize("how", ["keep", "plain"])
def test_freed_memory_stays_where_a_program_wants_it(how):
    """In a process of its own, because it holds for all of it."""
    command = [sys.executable, "-c", RESIDENT_AFTER_A_LARGE_TENSOR, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (int(done.stdout) >= 60 << 20) == (how == "keep")


def test_other_systems_keep_nothing(monkeypatch):
    """They say so, and nothing else happens."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
