"""Weights in large pages: the same values, in memory of their own."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anymamba.models import MambaConfig, MambaLM
from anymamba.ops import copy_to_large_pages

LARGE_PAGE = 2 << 20
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def large_bytes(tensor: Tensor) -> int:
    """Return how many bytes of the mapping around a tensor lie in large pages."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if borders := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, stop = (int(border, 16) for border in borders.groups())
            is_inside = start <= tensor.data_ptr() < stop
        elif is_inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


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


@pytest.mark.skipif(
    not SWITCH.is_file() or "[never]" in SWITCH.read_text(), reason="no large pages here"
)
def test_a_copy_lies_in_large_pages():
    """All but the part that fills no whole page."""
    copied = copy_to_large_pages(torch.ones(5 * LARGE_PAGE // 8))
    assert copied.data_ptr() % LARGE_PAGE == 0
    if large_bytes(copied) == 0:
        pytest.skip("the system had no large page to give")
    assert large_bytes(copied) == 2 * LARGE_PAGE


@pytest.mark.skipif(not SWITCH.is_file(), reason="no large pages here")
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_loaded_weights_begin_at_a_large_page(tmp_path, scheme):
    """What `from_pretrained` returns decodes at the speed of such pages."""
    MambaLM(MambaConfig(d_model=512, n_layer=1, vocab_size=4200)).save_pretrained(tmp_path)
    lm = MambaLM.from_pretrained(tmp_path, quantize=scheme)
    table = lm.backbone.embedding
    weight = table.weight if scheme is None else table.values
    assert weight.nbytes >= LARGE_PAGE
    assert weight.data_ptr() % LARGE_PAGE == 0
