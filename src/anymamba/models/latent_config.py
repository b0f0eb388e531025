"""The configuration of a model on continuous inputs."""

from dataclasses import dataclass, fields
from typing import Any

from anymamba.errors import ConfigError
from anymamba.nn import BidirectionalConfig, StackConfig, nearest

__all__ = ["LatentConfig", "stack_config_from_dict"]

READOUTS = ("each", "last", "mean")
TASKS = ("regression", "classification")


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes and options of a `LatentModel`.

    Args:
        d_input: numbers per time step that go in.
        d_output: numbers that come out, or classes.
        stack: what lies between; a `BidirectionalConfig` reads from both ends and cannot stream.
            `final_norm=True` there puts a norm before the head.
        readout: where the head reads: "each" place, the "last" one, or the "mean" of all.
        task: "regression" (mean squared error) or "classification" (cross-entropy on logits); only
            `loss` asks.

    Example:
        >>> stack = StackConfig(d_model=8, n_layer=1, final_norm=True)
        >>> config = LatentConfig(d_input=3, d_output=2, stack=stack)
        >>> LatentConfig.from_dict(config.to_dict()) == config
        True
    """

    d_input: int
    d_output: int
    stack: StackConfig
    readout: str = "each"
    task: str = "regression"

    def __post_init__(self) -> None:
        """Check sizes and names."""
        for name in ("d_input", "d_output"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"LatentConfig: {name} must be positive; got {getattr(self, name)}."
                )
        for name, known in (("readout", READOUTS), ("task", TASKS)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"LatentConfig: {name} must be one of {', '.join(known)}; got "
                    f"{getattr(self, name)!r}."
                )
        if not isinstance(self.stack, StackConfig):
            raise ConfigError(
                "LatentConfig: stack must be a StackConfig or a BidirectionalConfig; got "
                f"{type(self.stack).__name__}."
            )

    @property
    def is_bidirectional(self) -> bool:
        """Whether the stack reads from both ends."""
        return isinstance(self.stack, BidirectionalConfig)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        entries = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**entries, "stack": self.stack.to_dict()}

    @classmethod
    def from_dict(cls, entries: dict[str, Any]) -> "LatentConfig":
        """Build from the result of `to_dict`; an unknown key is refused."""
        check_keys("LatentConfig", entries, [entry.name for entry in fields(cls)])
        return cls(**{**entries, "stack": stack_config_from_dict(entries["stack"])})


def stack_config_from_dict(entries: dict[str, Any]) -> StackConfig:
    """Build the config of a stack, bidirectional if it says how directions are merged."""
    kind = BidirectionalConfig if "merge" in entries else StackConfig
    return kind.from_dict(entries)


def check_keys(where: str, entries: dict[str, Any], known: list[str]) -> None:
    """Raise `ConfigError` on an unknown key."""
    for name in entries:
        if name not in known:
            raise ConfigError(f"{where}: unknown key {name!r}.{nearest(name, known)}")
