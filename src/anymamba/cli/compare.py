"""`anymamba compare RUN`: a trained model beside a model that only counts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from tyro.conf import Positional, arg

from anymamba.cli.terminal import Terminal, human_bytes, new_table

if TYPE_CHECKING:
    from anymamba.train import Comparison

__all__ = ["Compare", "comparison_table", "comparison_verdict"]


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare a trained model with a Witten-Bell n-gram model of exactly the bytes it has seen.

    Both are asked for every byte of the held-out files. Exit code 1 if the n-gram model wins.
    """

    folder: Annotated[Positional[str], arg(metavar="RUN")]
    """The folder of a finished run over bytes."""

    order: int = 5
    """Bytes of context, and the one predicted: 5 looks back four bytes."""

    json: bool = False
    """Write JSON to stdout instead of text."""

    def run(self, terminal: Terminal) -> int:
        """Count, evaluate, and print both."""
        from anymamba.train import RunFolder, compare_run

        with terminal.err.status("counting, and reading the held-out files ..."):
            found = compare_run(RunFolder(self.folder), order=self.order)
        terminal.out.print(comparison_table(found))
        terminal.out.print(comparison_verdict(found))
        terminal.document(ok=found.model_wins, run=self.folder, **found._asdict())
        return 0 if found.model_wins else 1


def comparison_table(found: "Comparison") -> Table:
    """Return both models as a table."""
    table = new_table(
        f"Bits per byte on {found.held_out_files} held-out files, "
        f"{human_bytes(found.held_out_bytes)}"
    )
    table.add_column("model")
    table.add_column("trained on", justify="right")
    table.add_column("bits per byte", justify="right")
    seen = human_bytes(found.seen_bytes)
    table.add_row(f"Witten-Bell {found.order}-gram", seen, f"{found.ngram:.4f}")
    table.add_row("this model", seen, f"{found.model:.4f}", style="bold")
    return table


def comparison_verdict(found: "Comparison") -> str:
    """Return the result in a sentence."""
    share = abs(1 - found.model / found.ngram)
    if found.model_wins:
        return f"  [green]The model needs {share:.1%} fewer bits[/] than counting the same bytes.\n"
    return f"  [bold red]The model needs {share:.1%} more bits[/] than counting the same bytes.\n"
