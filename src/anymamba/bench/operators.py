"""The cases of the operators: SSD core, selective scan, causal convolution."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.bench.case import JUDGE, Case, Way, Ways, backward, exact, portable, without
from anymamba.bench.machine import Work
from anymamba.bench.portable import (
    CoreSizes,
    core_inputs,
    fastest_paths,
    in_dtype,
    path_note,
)
from anymamba.bench.scans import scan_inputs, unbind_loop
from anymamba.ops import causal_conv1d, selective_scan, ssd_core

__all__ = ["conv_cases", "core_cases", "scan_cases"]

Forward = Callable[..., Sequence[Tensor]]
# Longer than a chunk, and not a multiple of one.
GATE = 150


def core_cases(
    sizes: CoreSizes,
    modes: Sequence[str] = ("forward", "train"),
    dtype: torch.dtype = torch.float32,
) -> list[Case]:
    """Return the SSD core: native, the fastest portable path, and autograd over `serial`.

    Args:
        sizes: of the core.
        modes: any of "forward" and "train".
        dtype: of the activations.
    """
    b, s, m, h, g, p, r = sizes
    name = f"SSD core b{b} s{s} h{h} p{p} r{r} g{g}" + (f" m{m}" if m > 1 else "")

    def inputs_of(length: int) -> list[Tensor]:
        return in_dtype(core_inputs(*sizes._replace(s=length)), dtype)

    def ways(mode: str, length: int) -> Ways:
        paths = fastest_paths(sizes, mode, dtype)
        fastest = min(paths, key=lambda path: paths[path])
        serial = next(path for path in paths if path.kind == "serial")
        inputs = inputs_of(length)

        def run(inputs: Sequence[Tensor] = inputs, **how: Any) -> Callable[[], Sequence[Tensor]]:
            return _run(lambda *x: ssd_core(*x, **how), inputs, mode)

        return {
            "native": Way(run(impl="native")),
            "portable": portable(run(impl="portable", path=fastest), path_note(fastest)),
            "serial": portable(run(impl="portable", path=serial), str(serial.chunk_len)),
            JUDGE: portable(run(impl="reference")),
            **exact(run(_wide(inputs), impl="reference"), dtype),
        }

    work = Work(flops=sizes.flops)
    return [
        _operator_case("core", name, mode, dtype, b * s, work, s, ways, sizes.input_bytes(dtype))
        for mode in modes
        if mode != "step"
    ]


def scan_cases(
    s: int = 2048,
    i: int = 1536,
    r: int = 16,
    modes: Sequence[str] = ("forward", "train"),
    dtype: torch.dtype = torch.float32,
) -> list[Case]:
    """Return the selective scan: native, portable, and the loop over `unbind`.

    Args:
        s: tokens.
        i: channels.
        r: state size.
        modes: any of "forward" and "train".
        dtype: of the activations.
    """

    def inputs_of(length: int) -> list[Tensor]:
        u_bsi, dt_bsi, a_ir, b_bsr, c_bsr = scan_inputs(length, i, r)
        return [u_bsi.to(dtype), dt_bsi, a_ir, b_bsr.to(dtype), c_bsr.to(dtype)]

    def ways(mode: str, length: int) -> Ways:
        inputs = inputs_of(length)
        loop: Way | str = "the loop as users write it is for float32"
        if dtype == torch.float32:
            loop = portable(_run(unbind_loop, inputs, mode), turns=2)

        def run(impl: str, inputs: Sequence[Tensor] = inputs) -> Callable[[], Sequence[Tensor]]:
            return _run(lambda *x: selective_scan(*x, impl=impl), inputs, mode)

        return {
            "native": Way(run("native")),
            "portable": portable(run("portable")),
            "unbind": loop,
            JUDGE: portable(run("reference")),
            **exact(run("reference", _wide(inputs)), dtype),
        }

    # u and dt are read, y is written; B and C are small beside them.
    work = Work(flops=9.0 * s * i * r, moved=s * i * (2.0 * dtype.itemsize + 4))
    name = f"selective scan b1 s{s} d{i} r{r}"
    return [
        _operator_case("scan", name, mode, dtype, s, work, s, ways)
        for mode in modes
        if mode != "step"
    ]


def conv_cases(
    s: int = 2048,
    v: int = 1792,
    k: int = 4,
    modes: Sequence[str] = ("forward", "train"),
    dtype: torch.dtype = torch.float32,
) -> list[Case]:
    """Return the causal convolution with SiLU: native, portable, and torch's own `conv1d`.

    Args:
        s: tokens.
        v: channels.
        k: width of the filters.
        modes: any of "forward" and "train".
        dtype: of the activations.
    """

    def inputs_of(length: int) -> list[Tensor]:
        random = torch.Generator().manual_seed(0)
        shapes = (1, length, v), (v, k), (v,)
        return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]

    def ways(mode: str, length: int) -> Ways:
        inputs = inputs_of(length)

        def run(inputs: Sequence[Tensor] = inputs, **how: Any) -> Callable[[], Sequence[Tensor]]:
            return _run(
                lambda *x: [causal_conv1d(*x, activation="silu", **how).y_bsv], inputs, mode
            )

        return {
            "native": Way(run(impl="native")),
            "portable": portable(run(impl="portable")),
            "torch": portable(_run(_torch_conv, inputs, mode), "conv1d"),
            JUDGE: portable(run(impl="reference")),
            **exact(run(_wide(inputs), impl="reference"), dtype),
        }

    work = Work(flops=2.0 * s * v * k, moved=2.0 * s * v * dtype.itemsize)
    name = f"convolution b1 s{s} v{v} k{k}"
    return [
        _operator_case("conv", name, mode, dtype, s, work, s, ways)
        for mode in modes
        if mode != "step"
    ]


def _wide(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [x.float() for x in inputs]


def _torch_conv(x_bsv: Tensor, weight_vk: Tensor, bias_v: Tensor) -> Sequence[Tensor]:
    """Convolve as torch users write it."""
    v, k = weight_vk.shape
    y_bvs = F.conv1d(
        F.pad(x_bsv.transpose(1, 2), (k - 1, 0)), weight_vk.unsqueeze(1), bias_v, groups=v
    )
    return [F.silu(y_bvs).transpose(1, 2)]


def _run(forward: Forward, inputs: Sequence[Tensor], mode: str) -> Callable[[], Sequence[Tensor]]:
    return backward(forward, inputs) if mode == "train" else without(lambda: forward(*inputs))


def _operator_case(
    group: str,
    name: str,
    mode: str,
    dtype: torch.dtype,
    tokens: int,
    work: Work,
    length: int,
    ways: Callable[[str, int], Ways],
    inputs: int = 0,
) -> Case:
    times = 3.0 if mode == "train" else 1.0
    return Case(
        group=group,
        name=name,
        mode=mode,
        dtype=dtype,
        tokens=tokens,
        work=Work(times * work.flops, times * work.moved),
        length=length,
        gate_length=min(length, GATE),
        prepare=lambda: lambda length: ways(mode, length),
        inputs=inputs,
    )
