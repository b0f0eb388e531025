"""The figures of the scans: speed and memory of each algorithm against its baseline."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.bench.clock import interleaved_medians
from anymamba.bench.memory import intermediate_bytes, tensor_bytes
from anymamba.ops import SsdPath, selective_scan, ssd_core

__all__ = ["Figure", "core_figures", "scan_figures", "scan_inputs", "unbind_loop"]

Forward = Callable[..., Sequence[Tensor]]


class Figure(NamedTuple):
    """One measured row."""

    name: str
    seconds: float
    intermediates: int
    inputs: int


def core_figures(inputs: Sequence[Tensor], repeats: int = 5) -> list[Figure]:
    """Measure forward and backward of the three algorithms of the SSD core."""
    paths = [SsdPath.minimal(), SsdPath.serial(), SsdPath.serial_recalculated()]
    forwards: dict[str, Forward] = {
        path.kind: lambda *x, path=path: ssd_core(*x, path=path) for path in paths
    }
    return _figures(forwards, inputs, repeats)


def scan_figures(s: int = 2048, i: int = 1536, r: int = 16, repeats: int = 3) -> list[Figure]:
    """Measure forward and backward of the selective scan against a loop over `unbind`."""
    forwards: dict[str, Forward] = {
        "loop over unbind": unbind_loop,
        "selective_scan": selective_scan,
    }
    return _figures(forwards, scan_inputs(s, i, r), repeats)


def scan_inputs(s: int, i: int, r: int) -> list[Tensor]:
    """Return random inputs of the selective scan."""
    random = torch.Generator().manual_seed(0)
    return [
        torch.randn((1, s, i), generator=random),
        0.1 * torch.rand((1, s, i), generator=random),
        -1 - torch.rand((i, r), generator=random) * 15,
        torch.randn((1, s, r), generator=random),
        torch.randn((1, s, r), generator=random),
    ]


def unbind_loop(
    u_bsi: Tensor, dt_bsi: Tensor, a_ir: Tensor, b_bsr: Tensor, c_bsr: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence as torch users write it; `unbind` because slicing is quadratic."""
    state_bir = u_bsi.new_zeros(u_bsi.shape[0], *a_ir.shape)
    ys = []
    for u_bi, dt_bi, b_br, c_br in zip(
        u_bsi.unbind(1), dt_bsi.unbind(1), b_bsr.unbind(1), c_bsr.unbind(1), strict=True
    ):
        decay_bir = (dt_bi.unsqueeze(-1) * a_ir).exp()
        state_bir = decay_bir * state_bir + (dt_bi * u_bi).unsqueeze(-1) * b_br.unsqueeze(1)
        ys.append((state_bir @ c_br.unsqueeze(-1)).squeeze(-1))
    return torch.stack(ys, 1), state_bir


def _train(forward: Forward, inputs: Sequence[Tensor]) -> Callable[[], object]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    grads = [torch.ones_like(y) for y in forward(*inputs)]
    return lambda: torch.autograd.grad(list(forward(*leaves)), leaves, grads)


def _figures(forwards: dict[str, Forward], inputs: Sequence[Tensor], repeats: int) -> list[Figure]:
    seconds = interleaved_medians(
        {name: _train(forward, inputs) for name, forward in forwards.items()}, repeats=repeats
    )
    size = tensor_bytes(inputs)
    return [
        Figure(name, seconds[name], intermediate_bytes(forward, inputs), size)
        for name, forward in forwards.items()
    ]
