"""`anymamba verify MODEL`: every way of running the model gives the same outputs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from rich.markup import escape
from rich.table import Table
from tyro.conf import arg

from anymamba.cli.any_model import AnyModelOptions
from anymamba.cli.options import DType
from anymamba.cli.terminal import Terminal, new_table

if TYPE_CHECKING:
    from anymamba.models import VerifyReport

__all__ = ["Verify", "verify_table"]


@dataclass(frozen=True, kw_only=True)
class Verify(AnyModelOptions):
    """Run a model in every way there is and compare the results; exit code 1 if they differ."""

    length: int = 65
    """Tokens per row."""

    batch: int = 2
    """Rows."""

    dtypes: Annotated[tuple[DType, ...], arg(metavar="DTYPE ...")] = ("float32",)
    """Any of float32, float64, bfloat16, float16."""

    tolerance: Annotated[float | None, arg(metavar="X")] = None
    """Largest relative error accepted; by default it depends on dtype and depth."""

    def run(self, terminal: Terminal) -> int:
        """Verify and print the matrix."""
        from anymamba.models import verify

        model = self.load_any()
        with terminal.err.status("running the model every way ..."):
            report = verify(
                model,  # pyright: ignore[reportArgumentType]  # verify refuses what it cannot judge
                length=self.length,
                batch=self.batch,
                dtypes=self.dtypes,
                tolerance=self.tolerance,
            )
        terminal.out.print(verify_table(report, self.model))
        terminal.out.print(verdict(report))
        facts = report.to_dict()
        terminal.document(ok=facts.pop("ok"), model=self.model, **facts)
        return 0 if report.ok else 1


def verify_table(report: "VerifyReport", name: str) -> Table:
    """Return the matrix as a table."""
    table = new_table(
        f"{name}: error against the loop over time, {report.batch} x {report.length} tokens"
    )
    for column in ("way", "dtype"):
        table.add_column(column)
    for column in ("logits", "state", "limit"):
        table.add_column(column, justify="right")
    table.add_column("first other token")
    for row in report.rows:
        style = None if row.ok else "bold red"
        last = "none" if row.diverges_at is None else f"at {row.diverges_at}"
        table.add_row(
            row.way,
            row.dtype,
            _error(row.error),
            _error(row.state_error),
            f"{row.tolerance:.0e}",
            last if row.ran else "[dim]did not run[/]",
            style=style,
        )
    return table


def verdict(report: "VerifyReport") -> str:
    """Return the result in a sentence, and why some ways did not run."""
    lines = [f"  [dim]{escape(note)}[/]" for note in report.notes]
    failed = [f"{row.way} ({row.dtype})" for row in report.rows if not row.ok]
    if failed:
        lines.append(f"  [bold red]NOT EQUAL[/]: {', '.join(failed)}")
    else:
        lines.append("  [green]All equal[/], relative to the largest value.")
    return "\n".join(lines)


def _error(error: float | None) -> str:
    return "[dim]-[/]" if error is None else f"{error:.1e}"
