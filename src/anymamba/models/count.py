"""What a whole model costs, from its sizes alone: parameters, bytes, state, FLOP per token.

Nothing is run and nothing is allocated; a model on the meta device will do.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from anymamba.errors import ConfigError
from anymamba.models.lm import MambaLM
from anymamba.nn import MHA, GatedMLP, flops_per_token, state_bytes

__all__ = ["ModelCount", "PartCount", "count_model"]


class PartCount(NamedTuple):
    """One part of a model: the embedding, the parts of a layer, the final norm or the head."""

    name: str
    kind: str
    parameters: int
    bytes: int
    state_bytes: int
    flops: int


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
            many, total = kinds.get(part.kind, (0, PartCount(part.kind, part.kind, 0, 0, 0, 0)))
            sums = (a + b for a, b in zip(total[2:], part[2:], strict=True))
            kinds[part.kind] = many + 1, PartCount(part.kind, part.kind, *sums)
        return kinds

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        totals = {name: getattr(self, name) for name in PartCount._fields[2:]}
        return {**totals, "length": self.length, "parts": [part._asdict() for part in self.parts]}


def count_model(lm: MambaLM, *, length: int = 2048) -> ModelCount:
    """Count parameters, bytes, state and FLOP per token of every part of a model.

    The FLOP of a mixer are those of `flops_per_token`: a Mamba token costs the same at any place.
    Attention costs more with every token, so its figures are for a sequence of `length` tokens:
    the mean over the sequence, and the state at its end.

    Args:
        lm: the model.
        length: tokens of the sequence; matters to attention layers only.

    Example:
        >>> from anymamba.models import preset
        >>> count_model(MambaLM(preset("mamba-130m"), device="meta")).parameters
        129135360
    """
    if length < 1:
        raise ConfigError(f"count_model: length must be positive; got {length}.")
    seen: set[int] = set()
    parts = tuple(
        PartCount(name, kind, *_stored(module, seen), state, flops)
        for name, kind, module, state, flops in _parts(lm, length)
    )
    return ModelCount(parts, length)


def _parts(lm: MambaLM, length: int) -> Iterator[tuple[str, str, nn.Module, int, int]]:
    """Yield name, kind, module, bytes of state and FLOP per token."""
    yield "backbone.embedding", "embedding", lm.backbone.embedding, 0, 0
    for place, layer in enumerate(cast("list[Any]", lm.backbone.layers)):
        name = f"backbone.layers.{place}"
        yield f"{name}.norm", "norm", layer.norm, 0, 0
        # Virtual layers share weights, but each pass has a state of its own and costs as much.
        passes = lm.backbone.schedule.count(place)
        state, flops = (passes * cost for cost in _mixer(layer.mixer, length))
        yield f"{name}.mixer", type(layer.mixer).__name__, layer.mixer, state, flops
        if layer.has_mlp:
            yield f"{name}.norm2", "norm", layer.norm2, 0, 0
            yield f"{name}.mlp", type(layer.mlp).__name__, layer.mlp, 0, passes * _mlp(layer.mlp)
    yield "backbone.norm_f", "norm", lm.backbone.norm_f, 0, 0
    yield "lm_head", "head", lm.lm_head, 0, 2 * lm.config.d_model * lm.config.padded_vocab_size


def _mixer(mixer: Any, length: int) -> tuple[int, int]:
    """Return the bytes of the state and the FLOP of a token."""
    state = state_bytes(mixer)
    if not isinstance(mixer, MHA):
        return state, flops_per_token(mixer)
    like: Tensor = next(mixer.in_proj.parameters())
    state += 2 * mixer.num_heads_kv * mixer.head_dim * length * like.element_size()
    linear = _linear(mixer.in_proj, mixer.out_proj)
    convolution = 2 * mixer.d_conv * mixer.qkv_dim
    # Scores and sums, two FLOP each per entry of a head; a token sees (length + 1) / 2 on average.
    return state, linear + convolution + 2 * mixer.num_heads * mixer.head_dim * (length + 1)


def _mlp(mlp: Any) -> int:
    return _linear(mlp.fc1, mlp.fc2) if isinstance(mlp, GatedMLP) else 0


def _linear(*modules: Any) -> int:
    return sum(2 * x.in_features * x.out_features for x in modules)


def _stored(module: nn.Module, seen: set[int]) -> tuple[int, int]:
    """Return the number and the bytes of the parameters that no earlier part has counted."""
    new = [x for x in module.parameters() if id(x) not in seen]
    seen.update(id(x) for x in new)
    return sum(x.numel() for x in new), sum(x.numel() * x.element_size() for x in new)
