"""Blocks run wherever their inputs live: nothing is created elsewhere, widened, or read back."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anymamba.ops import SsdPath
from block_cases import CASES, WIDTH, build, tokens, used_cache
from laws import assert_same

# Three chunks each, so that every carry between chunks runs.
PATHS = (SsdPath.minimal(2), SsdPath.serial(2), SsdPath.serial_recalculated(2))


class Watch(TorchDispatchMode):
    """Note every operator, and each float64 result, result on a wrong device, and read-back."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.devices = devices
        self.seen: Counter[str] = Counter()
        self.faults: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen[str(func)] += 1
        if func is torch.ops.aten._local_scalar_dense.default:
            self.faults.append("a value was read back")
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float64:
                self.faults.append(f"{func} returned float64")
            if isinstance(leaf, Tensor) and leaf.device.type not in self.devices:
                self.faults.append(f"{func} returned a tensor on {leaf.device}")
        return result


def loss_of(y: Tensor, cache: Any) -> Tensor:
    """Return a loss that every output and every field of the state reaches."""
    parts = [y, *cache.to_tensors().values()]
    return torch.stack([part.square().sum() for part in parts]).sum()


def use_every_verb(block: Any, u_bsd: Tensor, cache: Any, case: str) -> None:
    """Run and differentiate everything a user can call without packing."""
    for path in (None,) if case.startswith("mamba1") else PATHS:
        block(u_bsd, path=path).square().sum().backward()
    block(u_bsd, impl="reference").square().sum().backward()
    loss_of(*block.prefill(u_bsd, cache)).backward()
    loss_of(*block.step(u_bsd[:, 0], cache)).backward()
    block.step_(u_bsd[:, 0], block.empty_cache(u_bsd.shape[0]))
    if hasattr(block, "step_infinite"):
        block.step_infinite(u_bsd[:, 0]).sum().backward()


@pytest.mark.parametrize("case", CASES)
def test_cpu_calls_read_nothing_back_and_stay_in_float32(case):
    """Every verb and its gradient, float32 on CPU: nothing is widened to float64 or read back."""
    block, u_bsd = build(case), tokens(2, 5)
    cache = used_cache(block, 2).requires_grad_()
    # The cache is checked against shapes that live on meta and cost nothing.
    with Watch("cpu", "meta") as watch:
        use_every_verb(block, u_bsd, cache, case)
    assert not watch.faults, watch.faults[:5]
    assert watch.seen["aten.mm.default"] > 0, "the watch saw nothing"


@pytest.mark.parametrize("case", CASES)
def test_no_tensor_is_created_on_another_device(case):
    """Every verb and its gradient, inputs on meta: no operator returns a tensor of the host."""
    cache = used_cache(build(case), 2).to("meta").requires_grad_()
    block = build(case).to("meta")
    u_bsd = torch.randn(2, 5, WIDTH, device="meta", requires_grad=True)
    with Watch("meta") as watch:
        use_every_verb(block, u_bsd, cache, case)
    assert not watch.faults, watch.faults[:5]
    assert watch.seen["aten.mm.default"] > 0, "the watch saw nothing"
    missing = [name for name, p in block.named_parameters() if p.grad is None]
    assert not missing, missing


@pytest.mark.parametrize("case", CASES)
def test_construction_on_a_device_stays_on_it(case):
    """A block built with device= touches that device only."""
    with Watch("meta") as watch:
        block = CASES[case](device="meta")
    assert not watch.faults, watch.faults[:5]
    assert {p.device.type for p in block.parameters()} == {"meta"}
    assert {x.device.type for x in block.empty_cache(2).to_tensors().values()} == {"meta"}


@pytest.mark.parametrize("case", CASES)
def test_packed_calls_run_on_meta(case):
    """Borders may live on the device or on the host; states have one row per sequence."""
    block = build(case).to("meta")
    u_1sd = torch.randn(1, 9, WIDTH, device="meta", requires_grad=True)
    for device in ("cpu", "meta"):
        borders = torch.tensor([0, 4, 4, 9]).to(device)
        y_1sd, cache = block.prefill(u_1sd, cu_seqlens=borders)
        loss_of(y_1sd, cache).backward()
        assert y_1sd.shape == u_1sd.shape
        assert {x.shape[0] for x in cache.to_tensors().values()} == {3}
        assert {x.device.type for x in cache.to_tensors().values()} == {"meta"}


@pytest.mark.parametrize("case", CASES)
def test_default_dtype_and_device_do_not_matter(case):
    """Results follow the inputs, whatever the program has set as its defaults."""
    block, u_bsd = build(case), tokens(2, 21).detach()
    cache = used_cache(block, 2)
    expected = [block(u_bsd), *block.prefill(u_bsd, cache)[1].to_tensors().values()]
    token = block.step(u_bsd[:, 0], cache)[0]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), Watch("cpu", "meta") as watch:
            actual = [block(u_bsd), *block.prefill(u_bsd, cache)[1].to_tensors().values()]
            again = block.step(u_bsd[:, 0], cache)[0]
    finally:
        torch.set_default_dtype(before)
    assert not watch.faults, watch.faults[:5]
    for want, got in zip([*expected, token], [*actual, again], strict=True):
        assert got.device.type == "cpu"
        assert torch.equal(want, got)


@pytest.mark.parametrize("case", CASES)
def test_memory_layout_of_the_input_does_not_matter(case):
    """A transposed or strided input gives the results of its contiguous copy."""
    block = build(case)
    x_bsd = tokens(3, 19).detach()
    strided_bsd = x_bsd.transpose(0, 1).contiguous().transpose(0, 1)
    padded_bsd = torch.nn.functional.pad(x_bsd, (0, 3))[..., :WIDTH]
    for other_bsd in (strided_bsd, padded_bsd):
        assert not other_bsd.is_contiguous()
        with torch.no_grad():
            y_bsd = block(x_bsd)
            assert_same(y_bsd, block(other_bsd))
            assert_same(y_bsd[:, 0], block.step(other_bsd[:, 0], block.empty_cache(3))[0])
