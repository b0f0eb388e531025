"""The optimiser of a run: AdamW, or Muon for matrices and AdamW for the rest.

torch's optimisers do the arithmetic. What is ours: who owns which rows, what decays, and a state of
named tensors. A segment is handed to its optimiser as a parameter that shares the memory of its
rows, so the model keeps one fused weight and one product.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.errors import CheckpointError, ConfigError
from anymamba.train.muon import build_muon
from anymamba.train.recipe_sections import OptimRecipe
from anymamba.train.segments import Owner, Segment, SegmentPlan, segment_plan

__all__ = ["TrainOptimizer", "build_optimizer"]

WHERE = "TrainOptimizer"
# Norm gains, biases and scalings per head or rank say how much of something there is; decay would
# pull that towards nothing.
DECAYING = (nn.Linear, nn.Embedding, nn.Conv1d)
# Where torch has AdamW as one kernel.
FUSED = ("cpu", "cuda")
# What torch's optimisers keep for a parameter, with the options that are used here.
STATE_KEYS: dict[Owner, list[str]] = {
    "adamw": ["step", "exp_avg", "exp_avg_sq"],
    "muon": ["momentum_buffer"],
}


@dataclass(frozen=True)
class Unit:
    """What one optimiser updates as a whole: a parameter, or neighbouring rows of one."""

    name: str
    weight: str
    owner: Owner
    parameter: nn.Parameter
    rows: slice | None
    # What the optimiser holds: the parameter, or another one on the memory of its rows.
    handle: nn.Parameter


def build_optimizer(
    model: nn.Module, recipe: OptimRecipe, plan: SegmentPlan | None = None
) -> "TrainOptimizer":
    """Return the optimiser that a recipe describes.

    Args:
        model: what is trained, on its device; frozen parameters stay as they are.
        recipe: the kind, the rates and the decay.
        plan: which rows belong to Muon; by default `segment_plan(model)`. Only with "muon".

    Raises:
        ConfigError: nothing can be trained, "muon" has nothing to do, or a plan was given without
            it.
        ShapeError: the plan does not fit the model.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> optimizer = build_optimizer(model, OptimRecipe(lr=0.1))
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """
    if plan is not None and recipe.name != "muon":
        raise ConfigError(
            f"build_optimizer: a plan needs name='muon'; got {recipe.name!r}. Leave the plan out."
        )
    if recipe.name == "adamw":
        plan = SegmentPlan()
    elif plan is None:
        plan = segment_plan(model)
    return TrainOptimizer(model, recipe, plan)


class TrainOptimizer:
    """One or two of torch's optimisers over the parameters of a model.

    Args:
        model: what is trained; tied parameters count once.
        recipe: the rates and the decay.
        plan: which rows belong to Muon; everything else is AdamW's.
    """

    def __init__(self, model: nn.Module, recipe: OptimRecipe, plan: SegmentPlan) -> None:
        """Share the parameters out; nothing is allocated yet."""
        self._recipe, self._plan = recipe, plan
        self._parameters = dict(model.named_parameters())
        plan.check(self._parameters)
        self._decaying = _decaying(model)
        trained = {n: p for n, p in self._parameters.items() if p.requires_grad}
        if not trained:
            raise ConfigError(f"{WHERE}: at least one parameter must require gradients; none does.")
        self._units = [unit for n, p in trained.items() for unit in _units(n, p, plan)]
        if recipe.name == "muon" and all(unit.owner == "adamw" for unit in self._units):
            raise ConfigError(
                f"{WHERE}: 'muon' needs a plan with trained rows for it; got a plan with none. "
                "Use optim.name='adamw'."
            )
        self._optimizers: dict[Owner, torch.optim.Optimizer] = {}
        for owner in ("adamw", "muon"):
            groups = self._groups(owner)
            if groups and owner == "muon":
                self._optimizers[owner] = build_muon(groups, next(iter(trained.values())).device)
            elif groups:
                on_kernel = all(p.device.type in FUSED for p in trained.values())
                self._optimizers[owner] = torch.optim.AdamW(
                    groups, betas=recipe.betas, eps=recipe.eps, fused=on_kernel or None
                )
        self._lr_factor = 1.0

    def step(self) -> None:
        """Move every parameter that has a gradient."""
        segments = [unit for unit in self._units if unit.rows is not None]
        for unit in segments:
            # Anew each time: the model may have been moved or cast, and gradients come and go.
            grad = unit.parameter.grad
            unit.handle.data = unit.parameter.detach()[unit.rows]
            unit.handle.grad = None if grad is None else grad[unit.rows]
        for optimizer in self._optimizers.values():
            optimizer.step()
        for unit in segments:
            # Else a slice would keep the memory of the whole gradient.
            unit.handle.grad = None

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def set_lr_factor(self, factor: float) -> None:
        """Multiply the recipe's learning rates by a factor; see `schedule_factor`."""
        if not factor >= 0:
            raise ConfigError(f"{WHERE}.set_lr_factor: must be at least 0; got {factor}.")
        self._lr_factor = float(factor)
        for owner, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = self._lr(owner) * self._lr_factor

    def state_dict(self) -> dict[str, Any]:
        """Return {"tensors": by name, "values": plain}; the tensors are the live ones, not copies.

        The names are "parameter/quantity" or "parameter[segment]/quantity".
        """
        tensors = {
            f"{unit.name}/{key}": value
            for unit in self._units
            for key, value in self._optimizers[unit.owner].state.get(unit.handle, {}).items()
        }
        values = {
            "name": self._recipe.name,
            "lr_factor": self._lr_factor,
            "tensors": len(tensors),
        }
        return {"tensors": tensors, "values": values}

    def empty_tensors(self) -> dict[str, Tensor]:
        """Return zeros in the place of every tensor that `state_dict` may ever hold."""
        return {
            f"{unit.name}/{key}": torch.zeros((), dtype=torch.float32)
            if key == "step"
            else torch.zeros_like(unit.handle).detach()
            for unit in self._units
            for key in STATE_KEYS[unit.owner]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the result of `state_dict`, bit for bit; the tensors are copied.

        Args:
            state: of an optimiser with the same recipe for a model of the same shapes.

        Raises:
            CheckpointError: it belongs to another optimiser or model, or a tensor is missing.
        """
        tensors, values = dict(state["tensors"]), state["values"]
        if values["name"] != self._recipe.name:
            raise CheckpointError(
                f"{WHERE}: the state must be of {self._recipe.name!r}; got {values['name']!r}."
            )
        if values["tensors"] != len(tensors):
            raise CheckpointError(
                f"{WHERE}: the state must hold all of its {values['tensors']} tensors; "
                f"got {len(tensors)}."
            )
        found = {unit.handle: _take(unit, tensors) for unit in self._units}
        if tensors:
            raise CheckpointError(
                f"{WHERE}: every tensor of the state must belong to the model; "
                f"got {next(iter(tensors))!r}, which no parameter has."
            )
        for optimizer in self._optimizers.values():
            held = (handle for group in optimizer.param_groups for handle in group["params"])
            # torch's own loading knows which quantities follow the device of a parameter.
            optimizer.load_state_dict(
                {
                    "state": {i: found[h] for i, h in enumerate(held) if found[h]},
                    "param_groups": optimizer.state_dict()["param_groups"],
                }
            )
        self.set_lr_factor(values["lr_factor"])

    def describe(self) -> str:
        """Return who owns what: a line for each parameter, and one for the sum.

        A line has the rank, name, shape, size, optimiser, peak learning rate, decay and segments; a
        star marks segments that stay on AdamW.
        """
        rows = [self._line(name, p) for name, p in self._parameters.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        total = sum(p.numel() for p in self._parameters.values())
        on_muon = sum(unit.handle.numel() for unit in self._units if unit.owner == "muon")
        kind = ""
        if "muon" in self._optimizers:
            muon = type(self._optimizers["muon"])
            kind = f" ({muon.__module__.split('.')[0]}'s {muon.__name__})"
        summary = f"{total} parameters, {on_muon} on muon{kind}, {100 * on_muon / total:.1f} %"
        if any("*" in line for line in lines):
            summary += "; * these rows are on adamw"
        return "\n".join([*lines, summary])

    def _line(self, name: str, parameter: nn.Parameter) -> tuple[str, ...]:
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        start = (f"{parameter.dim()}-D", name, shape, str(parameter.numel()))
        if not parameter.requires_grad:
            return (*start, "frozen", "", "", "")
        segments = self._plan.weights.get(name, ())
        owner: Owner = "muon" if any(s.owner == "muon" for s in segments) else "adamw"
        rates = (f"lr {self._lr(owner):g}", f"decay {self._decay(name):g}")
        return (*start, owner, *rates, ", ".join(map(_segment_word, segments)))

    def _lr(self, owner: Owner) -> float:
        recipe = self._recipe
        return recipe.lr if owner == "adamw" or recipe.muon_lr is None else recipe.muon_lr

    def _decay(self, name: str) -> float:
        return self._recipe.weight_decay if name in self._decaying else 0.0

    def _groups(self, owner: Owner) -> list[dict[str, Any]]:
        """Return the parameter groups of an optimiser: what decays, and what does not."""
        groups: dict[tuple[float, Any], list[nn.Parameter]] = {}
        for unit in self._units:
            if unit.owner == owner:
                # torch's kernels take plain or distributed tensors, not both at once.
                mesh = getattr(unit.handle, "device_mesh", None)
                groups.setdefault((self._decay(unit.weight), mesh), []).append(unit.handle)
        return [
            {"params": handles, "lr": self._lr(owner), "weight_decay": decay}
            for (decay, _), handles in groups.items()
        ]


def _decaying(model: nn.Module) -> set[str]:
    """Return the names of the parameters that decay: weights of linear maps, unless tagged."""
    return {
        f"{place}.{key}".lstrip(".")
        for place, module in model.named_modules()
        if isinstance(module, DECAYING)
        for key, weight in module._parameters.items()
        # A weight that ranks share is two parameters, "weight_own" and "weight_shared".
        if key.startswith("weight") and not getattr(weight, "_no_weight_decay", False)
    }


def _units(name: str, parameter: nn.Parameter, plan: SegmentPlan) -> Iterator[Unit]:
    """Yield what is updated as a whole."""
    segments = plan.weights.get(name)
    if segments is None:
        yield Unit(name, name, "adamw", parameter, None, parameter)
        return
    if len(segments) == 1:
        yield Unit(name, name, segments[0].owner, parameter, None, parameter)
        return
    start = 0
    for segment in segments:
        rows = slice(start, start + segment.rows)
        handle = nn.Parameter(parameter.detach()[rows])
        yield Unit(f"{name}[{segment.name}]", name, segment.owner, parameter, rows, handle)
        start += segment.rows


def _segment_word(segment: Segment) -> str:
    return f"{segment.name} {segment.rows}{'*' if segment.owner == 'adamw' else ''}"


def _take(unit: Unit, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move a unit's tensors out of a state, as copies; none if it never had a gradient."""
    keys = STATE_KEYS[unit.owner]
    present = [key for key in keys if f"{unit.name}/{key}" in tensors]
    if present and present != keys:
        raise CheckpointError(f"{WHERE}: {unit.name} must have the tensors {keys}; got {present}.")
    taken: dict[str, Tensor] = {}
    for key in present:
        value = tensors.pop(f"{unit.name}/{key}")
        shape = () if key == "step" else tuple(unit.handle.shape)
        if tuple(value.shape) != shape:
            raise CheckpointError(
                f"{WHERE}: {unit.name}/{key} must have shape {shape}; got {tuple(value.shape)}."
            )
        taken[key] = value.clone()
    return taken
