"""How one part of each kind is run on its own, to be timed."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from anymamba.models import ModelCount

__all__ = ["part_cases"]


def part_cases(model: Any, count: "ModelCount", length: int) -> dict[str, Callable[[], object]]:
    """Return a function for each kind of part that runs the first of that kind.

    Args:
        model: a `MambaLM`, a `LatentModel` or an `Encoder`.
        count: of its parts.
        length: tokens of the one sequence that runs.
    """
    first = {part.kind: part.name for part in reversed(count.parts)}
    inputs = _Inputs(model, length)
    return {kind: _case(kind, _module(model, first[kind]), inputs) for kind in count.by_kind()}


class _Inputs:
    """What goes into the model, and what goes from layer to layer."""

    def __init__(self, model: Any, length: int) -> None:
        import torch

        from anymamba.models import Encoder, LatentModel, MambaLM

        like = next(model.parameters())
        stack = model.backbone if isinstance(model, MambaLM) else model.stack
        config = stack.stack_config
        if isinstance(model, LatentModel):
            self.given = like.new_zeros(1, length, model.config.d_input)
        else:
            self.given = torch.zeros(1, length, dtype=torch.int64, device=like.device)
        self.x_bsd = like.new_zeros(1, length, config.d_model)
        self.in_fp32: bool = config.residual_in_fp32
        reads_once = isinstance(model, LatentModel) and model.config.readout != "each"
        reads_once |= isinstance(model, Encoder) and model.config.head == "pooled"
        self.read_bsd = self.x_bsd[:, -1:] if reads_once else self.x_bsd


def _module(model: Any, name: str) -> "nn.Module":
    """Return a part by its name; that of a tied head has a remark behind it."""
    return model.get_submodule(name.partition(" ")[0])


def _case(kind: str, module: Any, inputs: _Inputs) -> Callable[[], object]:
    import torch
    import torch.nn.functional as F

    from anymamba.nn import add_norm

    x_bsd, given = inputs.x_bsd, inputs.given
    if kind in ("embedding", "projection"):
        return lambda: module(given)
    if kind == "norm":
        return lambda: add_norm(module, x_bsd, x_bsd, inputs.in_fp32)
    if kind == "registers":
        return lambda: module.insert(x_bsd, 0, x_bsd.shape[1])[0].into(x_bsd)
    if kind == "merge":
        return lambda: module(torch.cat([x_bsd, x_bsd], dim=-1))
    if kind == "gates":
        return lambda: module(x_bsd, _streams(module, x_bsd))
    if kind == "head" and isinstance(module, torch.nn.Embedding):
        return lambda: F.linear(inputs.read_bsd, module.weight)
    if kind == "head":
        return lambda: module(inputs.read_bsd)
    return lambda: module(x_bsd)


def _streams(gates: Any, x_bsd: "Tensor") -> "Tensor":
    """Return as many streams as these gates meet at least: all where they mix."""
    many = gates.n_stream if hasattr(gates, "b_beta") else max(1, gates.n_stream - 1)
    return x_bsd[:, :, None].expand(-1, -1, many, -1)
