"""The folder of a run: what lies where, who may write there, and whether it may go on.

recipe.toml       the resolved recipe
metrics.jsonl     what happened, a line per event
checkpoints/      numbered, see checkpoint.py
tokens/           token files, unless data.cache_dir says otherwise
model/            the trained model, as `from_pretrained` reads it
loss.png          curves
report.md         a page for people
"""

import os
from pathlib import Path

from filelock import FileLock, Timeout

from anymamba.errors import CheckpointError, ConfigError
from anymamba.io import replacing, utf8
from anymamba.train.checkpoint import CheckpointFolder
from anymamba.train.data import TrainingData, prepare_data
from anymamba.train.recipe import load_recipe, recipe_difference, recipe_to_toml
from anymamba.train.recipe_sections import DataRecipe, Recipe

__all__ = ["RunFolder"]

WHERE = "train"


class RunFolder:
    """One run on disk.

    Args:
        folder: where it lies; created by `claim`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Name the places; nothing is touched."""
        self.folder = Path(folder)
        self.recipe = self.folder / "recipe.toml"
        self.metrics = self.folder / "metrics.jsonl"
        self.tokens = self.folder / "tokens"
        self.model = self.folder / "model"
        self.picture = self.folder / "loss.png"
        self.report = self.folder / "report.md"
        # Held until `release`, or until the process ends, however it ends.
        self._lock = FileLock(self.folder / ".lock", timeout=0, thread_local=False)

    def prepare_data(self, recipe: DataRecipe) -> TrainingData:
        """Open the run's tokens, or make them; see `anymamba.train.prepare_data`."""
        return prepare_data(recipe, recipe.cache_dir or self.tokens, self.folder)

    def checkpoints(self, keep: int = 3) -> CheckpointFolder:
        """Return the run's checkpoints."""
        return CheckpointFolder(self.folder / "checkpoints", keep=keep)

    def claim(self, recipe: Recipe, *, resume: bool) -> None:
        """Create the folder, or check that it may be gone on with, and keep other processes out.

        It holds no run before `keep_recipe`.

        Raises:
            ConfigError: there is a run already and `resume` is false, the recipe differs from that
                of the run, or another process trains there.
            CheckpointError: the folder cannot be written.
        """
        utf8("recipe", recipe_to_toml(recipe))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout as error:
            raise ConfigError(
                f"{WHERE}: one process at a time may train in {str(self.folder)!r}; another one "
                "does. Wait for it, or set loop.out to another place."
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"{WHERE}: {str(self.folder)!r} must be a folder that can be written; {error}. "
                "Set loop.out to another place."
            ) from error
        if self.recipe.exists():
            self._check(recipe, resume)

    def keep_recipe(self, recipe: Recipe) -> None:
        """Write the recipe, once it is known that it can be followed: now this is a run."""
        with replacing(WHERE, self.recipe) as stream:
            stream.write(utf8("recipe", recipe_to_toml(recipe)))

    def release(self) -> None:
        """Let other processes in."""
        self._lock.release()

    def saved_recipe(self) -> Recipe:
        """Return the recipe of the run.

        Raises:
            ConfigError: there is no run here.
        """
        if not self.recipe.is_file():
            raise ConfigError(
                f"{WHERE}: there is no run in {str(self.folder)!r}; it would hold a recipe.toml. "
                "Check the path."
            )
        return load_recipe(self.recipe)

    def _check(self, recipe: Recipe, resume: bool) -> None:
        if not resume:
            raise ConfigError(
                f"{WHERE}: {str(self.folder)!r} must be free for a new run; it holds one already. "
                "Go on with --resume, or set loop.out to another place."
            )
        if difference := recipe_difference(self.saved_recipe(), recipe):
            lines = "\n  ".join(difference)
            raise ConfigError(
                f"{WHERE}: a run can be resumed only with the recipe it began with; these fields "
                f"differ (saved -> given):\n  {lines}\nTake them back, or set loop.out to another "
                "place for a new run."
            )
