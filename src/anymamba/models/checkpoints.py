"""Who reads and writes language models: `anymamba.io`, so that this room knows no disk."""

from typing import TYPE_CHECKING, Any, Protocol

from anymamba.errors import BackendError

if TYPE_CHECKING:
    from anymamba.models.lm import MambaLM

__all__ = ["checkpoints_for", "use_checkpoints"]


class Checkpoints(Protocol):
    """What reads and writes them."""

    def load(self, name: str, **options: Any) -> "MambaLM": ...

    def save(self, model: "MambaLM", directory: Any, **options: Any) -> None: ...


_checkpoints: list[Checkpoints] = []


def use_checkpoints(checkpoints: Checkpoints) -> None:
    """Say who serves `from_pretrained` and `save_pretrained`."""
    _checkpoints[:] = [checkpoints]


def checkpoints_for(what: str) -> Checkpoints:
    """Return who serves a method of `MambaLM`.

    Raises:
        BackendError: nobody does yet.
    """
    if not _checkpoints:
        raise BackendError(f"MambaLM.{what}: import anymamba (or anymamba.io) first.")
    return _checkpoints[0]
