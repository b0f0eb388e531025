"""Access to the golden data: float64 results of the official implementation, committed here."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

HERE = Path(__file__).parent / "goldens"


class GoldenCase(NamedTuple):
    """One case of a golden file; loss = sum over `weights` of sum(output * weight)."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    weights: dict[str, Tensor]
    grads: dict[str, Tensor]

    def cast(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the inputs in `dtype`, floating ones as leaves that require a gradient."""
        return {
            name: value.to(dtype).requires_grad_() if value.is_floating_point() else value
            for name, value in self.inputs.items()
        }


@cache
def _load(name: str) -> dict[str, Tensor]:
    return load_file(HERE / f"{name}.safetensors")


def golden_case(name: str, case: str) -> GoldenCase:
    """Load one case, such as `golden_case("ops/ssd", "groups_z")`."""
    parts: dict[str, dict[str, Tensor]] = {"in": {}, "out": {}, "w": {}, "grad": {}}
    for key, value in _load(name).items():
        head, part, entry = key.split("/", 2)
        if head == case:
            parts[part][entry] = value
    assert parts["in"], f"no case {case} in {name}"
    return GoldenCase(parts["in"], parts["out"], parts["w"], parts["grad"])


def check_golden(
    case: GoldenCase,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    *,
    angles: tuple[str, ...] = (),
) -> None:
    """Compare outputs and gradients with a golden case, at the tolerance its storage allows.

    Args:
        case: the golden case.
        inputs: the leaves the outputs were computed from, as `case.cast` returned them.
        outputs: results by golden name.
        angles: outputs that are compared modulo a full turn.
    """
    assert set(outputs) == set(case.outputs), (set(outputs), set(case.outputs))
    dtype = next(v.dtype for v in inputs.values() if v.is_floating_point())
    for name, expected in case.outputs.items():
        actual = outputs[name].detach()
        assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
        if name in angles:
            turn = 2 * torch.pi
            gap = actual.double() - expected.double()
            error = (gap - turn * (gap / turn).round()).abs().max() / expected.abs().max()
        else:
            error = relative_error(expected, actual)
        assert error <= _tolerance(dtype, expected.dtype, 2e-5), (name, float(error))
    if not case.weights:
        return
    loss = sum(
        (outputs[name] * w.to(outputs[name].dtype)).sum() for name, w in case.weights.items()
    )
    leaves = [inputs[name] for name in case.grads]
    for name, actual in zip(case.grads, torch.autograd.grad(loss, leaves), strict=True):
        expected = case.grads[name]
        error = relative_error(expected, actual)
        assert error <= _tolerance(dtype, expected.dtype, 2e-4), (f"grad {name}", float(error))


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """Largest difference over the largest expected magnitude."""
    scale = expected.double().abs().max().clamp(min=1e-30)
    return float((actual.double() - expected.double()).abs().max() / scale)


def _tolerance(dtype: torch.dtype, stored: torch.dtype, single: float) -> float:
    # float32 storage of a golden value rounds it by 6e-8 of its size.
    if dtype == torch.float64:
        return 1e-9 if stored == torch.float64 else 5e-7
    return single
