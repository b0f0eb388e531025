"""Which matrices Muon takes, and where a fused projection is cut for it.

A fused projection is several linear maps in one product: their rows lie under each other. Muon
treats the singular values of a matrix, and the singular values of the stack are not those of its
parts, so each part is treated by itself. Rows that make one number per head (step sizes, decays)
are scalars in a row, not a map between spaces; they stay with AdamW. So does everything that this
file does not name: embeddings, heads, convolutions, vectors, `dt_proj`, the scalings of MIMO.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import nn

from anymamba.errors import ConfigError, ShapeError
from anymamba.nn import MHA, GatedMLP, Mamba, Mamba2, Mamba3

__all__ = ["Segment", "SegmentPlan", "segment_plan"]

Owner = Literal["muon", "adamw"]
# What these rows make: the raw step size, decay rate and trapezoid weight, each one per head.
PER_HEAD = frozenset({"dt", "A", "lambda"})
WHOLE = "whole"


class Segment(NamedTuple):
    """Neighbouring rows of a weight that one optimiser updates as one matrix."""

    name: str
    rows: int
    owner: Owner


@dataclass(frozen=True)
class SegmentPlan:
    """The weights that are cut into segments, by their names in the model.

    Args:
        weights: the segments of each weight, from its first row to its last.

    Example:
        >>> plan = SegmentPlan({"fc1.weight": (Segment("a", 4, "muon"), Segment("b", 2, "adamw"))})
        >>> plan.check({"fc1.weight": nn.Linear(3, 6).weight})
        >>> plan.without_segment("a").weights["fc1.weight"][0].owner
        'adamw'
    """

    weights: Mapping[str, tuple[Segment, ...]] = field(default_factory=dict)

    def extend(self, weights: Mapping[str, tuple[Segment, ...]]) -> "SegmentPlan":
        """Return the plan with further weights, or with other segments for those it has."""
        return SegmentPlan({**self.weights, **weights})

    def without_segment(self, name: str) -> "SegmentPlan":
        """Return the plan with the segments of this name on AdamW.

        Args:
            name: such as "rotation"; "whole" are the projections of one part.

        Raises:
            ConfigError: no weight has such a segment.
        """
        known = {segment.name for segments in self.weights.values() for segment in segments}
        if name not in known:
            raise ConfigError(
                f"SegmentPlan.without_segment: the plan must have a segment of this name; "
                f"got {name!r}. It has: {', '.join(sorted(known))}."
            )
        return SegmentPlan(
            {
                weight: tuple(s._replace(owner="adamw") if s.name == name else s for s in segments)
                for weight, segments in self.weights.items()
            }
        )

    def check(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raise unless every weight is there, is a matrix, and is covered by its segments.

        Args:
            parameters: of the model, by name.

        Raises:
            ConfigError: there is no parameter of that name, or a segment is empty or has
                the name of another.
            ShapeError: the weight is no matrix, or its segments have another number of rows.
        """
        where = "SegmentPlan"
        for name, segments in self.weights.items():
            if name not in parameters:
                raise ConfigError(f"{where}: the model must have a parameter {name!r}; it has not.")
            shape = tuple(parameters[name].shape)
            if len(shape) != 2:
                raise ShapeError(f"{where}: {name} must be a matrix; got shape {shape}.")
            names = {segment.name for segment in segments}
            if any(segment.rows < 1 for segment in segments) or len(names) < len(segments):
                raise ConfigError(
                    f"{where}: the segments of {name} must have names of their own and at least "
                    f"one row each; got {_widths(segments)}."
                )
            if sum(segment.rows for segment in segments) != shape[0]:
                raise ShapeError(
                    f"{where}: the segments of {name} must add up to its {shape[0]} rows; "
                    f"got {_widths(segments)}."
                )


def segment_plan(model: nn.Module) -> SegmentPlan:
    """Return the plan of a model's blocks, attention layers and gated MLPs.

    Found by the type of a module, never by the name of a parameter. A projection that was replaced
    by something without a `weight` of its own (an adapter, say) is left out.

    Args:
        model: anything that holds `Mamba`, `Mamba2`, `Mamba3`, `MHA` or `GatedMLP`.

    Example:
        >>> plan = segment_plan(Mamba(d_model=8, d_state=4))
        >>> [(part.name, part.rows, part.owner) for part in plan.weights["x_proj.weight"]]
        [('dt', 1, 'adamw'), ('B', 4, 'muon'), ('C', 4, 'muon')]
    """
    # Tied weights appear under their first name only.
    parameters = dict(model.named_parameters())
    weights: dict[str, tuple[Segment, ...]] = {}
    for place, module in model.named_modules():
        for projection, rows in _projections(module):
            name = f"{place}.{projection}.weight".lstrip(".")
            if name in parameters:
                weights[name] = tuple(
                    Segment(part, count, "adamw" if part in PER_HEAD else "muon")
                    for part, count in (rows or {WHOLE: parameters[name].shape[0]}).items()
                    if count > 0
                )
    return SegmentPlan(weights)


def _projections(module: nn.Module) -> Iterator[tuple[str, dict[str, int] | None]]:
    """Yield a module's linear maps and the rows of their parts; None if there is one part."""
    if isinstance(module, Mamba | Mamba2 | Mamba3):
        yield from module.projection_rows.items()
        yield "out_proj", None
    elif isinstance(module, MHA):
        shared = module.num_heads_kv * module.head_dim
        heads = {"q": module.num_heads * module.head_dim, "k": shared, "v": shared}
        half = module.mlp_dim // 2
        yield "in_proj", {**heads, "value": half, "gate": half}
        yield "out_proj", None
    elif isinstance(module, GatedMLP):
        yield "fc1", dict.fromkeys(("value", "gate"), module.fc2.in_features)
        yield "fc2", None


def _widths(segments: tuple[Segment, ...]) -> str:
    return " + ".join(f"{segment.name} {segment.rows}" for segment in segments) or "none"
