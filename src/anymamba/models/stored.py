"""Models that have files of their own: a config that is JSON, and weights beside it."""

from typing import Any, ClassVar, Protocol, TypeVar

from torch import nn

from anymamba.errors import BackendError

__all__ = ["STORED_MODELS", "StoredModel", "use_model_files"]

StoredT = TypeVar("StoredT", bound="StoredModel")
STORED_MODELS: "dict[str, type[StoredModel]]" = {}


class ModelFiles(Protocol):
    """What reads and writes models; `anymamba.io` provides it, so that this room knows no disk."""

    def load(self, kind: type[StoredT], name: Any, **options: Any) -> StoredT: ...

    def save(self, model: "StoredModel", directory: Any, **options: Any) -> None: ...


_files: list[ModelFiles] = []


def use_model_files(files: ModelFiles) -> None:
    """Say who serves `from_pretrained` and `save_pretrained` of stored models."""
    _files[:] = [files]


class StoredModel(nn.Module):
    """A model built from a config alone, so that config and weights are all there is to store."""

    config: Any
    config_type: ClassVar[type]

    def __init_subclass__(cls, **options: Any) -> None:
        """Make the class known by its name, which is what its files say."""
        super().__init_subclass__(**options)
        STORED_MODELS[cls.__name__] = cls

    @classmethod
    def from_pretrained(cls: type[StoredT], name: Any, **options: Any) -> StoredT:
        """Load a model of this class from a directory or the hub.

        Args:
            name: a folder, or a name on the hub.
            **options: `device`, `dtype`, `revision`, `cache_dir`, `local_files_only`; see
                `anymamba.io.load_model`.
        """
        return _service(f"{cls.__name__}.from_pretrained").load(cls, name, **options)

    def save_pretrained(self, directory: Any, **options: Any) -> None:
        """Write config and weights to a directory.

        Args:
            directory: where to; created if missing.
            **options: `dtype`, `max_shard_bytes`; see `anymamba.io.save_model`.
        """
        _service(f"{type(self).__name__}.save_pretrained").save(self, directory, **options)


def _service(where: str) -> ModelFiles:
    if not _files:
        raise BackendError(f"{where}: import anymamba (or anymamba.io) first.")
    return _files[0]
