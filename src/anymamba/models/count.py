"""What a whole model costs, from its sizes alone: parameters, bytes, state, FLOP per token.

Nothing is run and nothing is allocated; a model on the meta device will do.
"""

from typing import Any, NamedTuple

from torch import nn

from anymamba.errors import ConfigError
from anymamba.models.count_parts import Part, parts_of
from anymamba.models.encoder import Encoder
from anymamba.models.latent import LatentModel
from anymamba.models.lm import MambaLM

__all__ = ["ModelCount", "PartCount", "count_model"]


class PartCount(NamedTuple):
    """One part of a model: the embedding, the parts of a layer, the final norm or the head.

    `passes` is how often a token runs through it: virtual layers share their weights. State and
    FLOP are those of all passes.
    """

    name: str
    kind: str
    parameters: int
    bytes: int
    state_bytes: int
    flops: int
    passes: int = 1


class ModelCount(NamedTuple):
    """All parts in the order of the computation, and their sums; tied weights count once."""

    parts: tuple[PartCount, ...]
    length: int

    @property
    def parameters(self) -> int:
        """Trained numbers of the whole model."""
        return sum(part.parameters for part in self.parts)

    @property
    def bytes(self) -> int:
        """Bytes of the stored parameters."""
        return sum(part.bytes for part in self.parts)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence of `length` tokens."""
        return sum(part.state_bytes for part in self.parts)

    @property
    def flops(self) -> int:
        """Floating-point operations of one token."""
        return sum(part.flops for part in self.parts)

    def by_kind(self) -> dict[str, tuple[int, PartCount]]:
        """Return how many parts there are of each kind, and their sum."""
        kinds: dict[str, tuple[int, PartCount]] = {}
        for part in self.parts:
            many, total = kinds.get(part.kind, (0, PartCount(part.kind, part.kind, 0, 0, 0, 0, 0)))
            sums = (a + b for a, b in zip(total[2:], part[2:], strict=True))
            kinds[part.kind] = many + 1, PartCount(part.kind, part.kind, *sums)
        return kinds

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        totals = {name: getattr(self, name) for name in PartCount._fields[2:6]}
        return {**totals, "length": self.length, "parts": [part._asdict() for part in self.parts]}


def count_model(lm: MambaLM | LatentModel | Encoder, *, length: int = 2048) -> ModelCount:
    """Count parameters, bytes, state and FLOP per token of every part of a model.

    The FLOP of a mixer are those of `flops_per_token`: a Mamba token costs the same at any place.
    Attention costs more with every token, so its figures are for a sequence of `length` tokens:
    the mean over the sequence, and the state at its end. A head that reads a sequence once is
    spread over its tokens. A register costs what a token costs, and is none of the `length`. What
    reads from both ends has no state.

    Args:
        lm: the model: a `MambaLM`, a `LatentModel` or an `Encoder`.
        length: tokens of the sequence; matters to attention layers and heads that read once.

    Raises:
        ConfigError: a length that is not positive, or a model of another kind.

    Example:
        >>> from anymamba.models import preset
        >>> count_model(MambaLM(preset("mamba-130m"), device="meta")).parameters
        129135360
    """
    if length < 1:
        raise ConfigError(f"count_model: length must be positive; got {length}.")
    if not isinstance(lm, MambaLM | LatentModel | Encoder):
        raise ConfigError(
            "count_model: the model must be a MambaLM, a LatentModel or an Encoder; got "
            f"{type(lm).__name__}. For one block use anymamba.nn.flops_per_token and state_bytes."
        )
    seen: set[int] = set()
    return ModelCount(tuple(_counted(part, seen) for part in parts_of(lm, length)), length)


def _counted(part: Part, seen: set[int]) -> PartCount:
    stored = _stored(part.module, seen)
    return PartCount(part.name, part.kind, *stored, part.state, part.flops, part.passes)


def _stored(module: nn.Module, seen: set[int]) -> tuple[int, int]:
    """Return the number and the bytes of the parameters that no earlier part has counted."""
    new = [x for x in module.parameters() if id(x) not in seen]
    seen.update(id(x) for x in new)
    return sum(x.numel() for x in new), sum(x.numel() * x.element_size() for x in new)
