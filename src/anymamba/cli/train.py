"""`anymamba train RECIPE`: from text to a model, with everything a person wants to see."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from tyro.conf import Positional, UseAppendAction, arg

from anymamba.cli.terminal import Terminal

if TYPE_CHECKING:
    from anymamba.train import Recipe, RunSummary, Trainer

__all__ = ["Train", "run_facts", "show_summary", "train_with_display"]

INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model after a recipe; without one, a small Mamba-3 on Python's own sources."""

    recipe: Annotated[Positional[str | None], arg(metavar="RECIPE")] = None
    """A TOML file; all defaults if left out, and with --resume the recipe of the run."""

    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="A.B=C")] = ()
    """Change a field of the recipe, such as optim.lr=1e-3; may be given several times."""

    resume: bool = False
    """Go on with the run in loop.out, from its newest whole checkpoint."""

    describe: bool = False
    """Print the resolved recipe and which optimiser owns which parameter; train nothing."""

    json: bool = False
    """Write JSON to stdout instead of text."""

    def run(self, terminal: Terminal) -> int:
        """Train, and say where everything lies."""
        recipe = self._recipe()
        if self.describe:
            return _describe(terminal, recipe)
        summary = train_with_display(terminal, recipe, resume=self.resume)
        if summary.is_first:
            show_summary(terminal, summary)
            terminal.document(ok=True, **run_facts(summary))
        return 0 if summary.finished else INTERRUPTED

    def _recipe(self) -> "Recipe":
        from anymamba.train import RunFolder, load_recipe

        file = None if self.recipe is None else Path(self.recipe)
        if self.resume and file is None:
            run = RunFolder(load_recipe(None, self.set).loop.out)
            # A mistyped folder must not become a new run with all defaults.
            run.saved_recipe()
            file = run.recipe
        return load_recipe(file, self.set)


def train_with_display(
    terminal: Terminal, recipe: "Recipe", *, resume: bool = False
) -> "RunSummary":
    """Train in view of the person at the terminal; Ctrl-C ends the run after its step."""
    from anymamba.cli.train_display import open_display
    from anymamba.ops import keep_freed_memory
    from anymamba.train import Trainer

    keep_freed_memory()
    display = open_display(terminal)
    trainer = Trainer(recipe, resume=resume, watch=display)
    with display, _stopping(terminal, trainer):
        return trainer.run()


@contextmanager
def _stopping(terminal: Terminal, trainer: "Trainer") -> Iterator[None]:
    """Turn the first Ctrl-C into a request to stop; the second one interrupts at once."""

    def stop(number: int, frame: Any) -> None:
        terminal.err.print("stopping after this step; again Ctrl-C to stop at once", style="dim")
        trainer.request_stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_facts(summary: "RunSummary") -> dict[str, Any]:
    """Return the plain values of a document."""
    held_out = summary.evaluation
    return {
        "finished": summary.finished,
        "step": summary.step,
        "tokens": summary.tokens,
        "seconds": summary.seconds,
        "skipped": summary.skipped,
        "bits_per_byte": None if held_out is None else held_out.bits_per_byte,
        "out": str(summary.folder.folder),
    }


def show_summary(terminal: Terminal, summary: "RunSummary") -> None:
    """Say how the run ended and what to do next."""
    out, folder = terminal.out, summary.folder
    if not summary.finished:
        out.print(
            f"\n  Stopped after step {summary.step:,}; nothing is lost. "
            "Go on with the same command and --resume.\n"
        )
        return
    skipped = f", {summary.skipped} skipped" if summary.skipped else ""
    out.print(
        f"\n  {summary.step:,} steps{skipped}, {summary.tokens:,} tokens in "
        f"{summary.seconds:.0f} s of training."
    )
    if summary.evaluation is not None:
        out.print(f"  Held out: [bold]{summary.evaluation.bits_per_byte:.4f}[/] bits per byte.")
    for path, what in (
        (folder.model, "the model, for anymamba generate, chat and verify"),
        (folder.picture, "the curves"),
        (folder.report, "all of it on a page"),
    ):
        out.print(f"  [bold]{escape(str(path))}[/]  {what}")
    out.print()


def _describe(terminal: Terminal, recipe: "Recipe") -> int:
    from anymamba.train import describe_recipe, recipe_to_toml

    owners = describe_recipe(recipe)
    terminal.out.print(recipe_to_toml(recipe), markup=False, soft_wrap=True)
    terminal.out.print(owners, markup=False, soft_wrap=True)
    terminal.document(ok=True, recipe=recipe_to_toml(recipe), owners=owners.splitlines())
    return 0
