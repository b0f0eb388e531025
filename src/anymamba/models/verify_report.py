"""What `verify` found: rows of the equality matrix, as values and as text."""

from dataclasses import dataclass
from textwrap import fill
from typing import Any, NamedTuple

__all__ = ["VerifyReport", "VerifyRow"]


class VerifyRow(NamedTuple):
    """One way in one dtype.

    `error` (of the logits) and `state_error` are the largest differences, relative to the largest
    expected value; None where there is nothing to compare. `diverges_at` is the first position
    whose most likely token differs; it is told, not judged. `note` says why a way did not run.
    """

    way: str
    dtype: str
    error: float | None
    state_error: float | None
    diverges_at: int | None
    tolerance: float
    note: str = ""

    @property
    def ran(self) -> bool:
        """Whether this way exists here."""
        return self.error is not None

    @property
    def ok(self) -> bool:
        """Whether every error is within the tolerance; a way that did not run does no harm."""
        # Written so that NaN fails.
        return all(
            error <= self.tolerance for error in (self.error, self.state_error) if error is not None
        )


@dataclass(frozen=True)
class VerifyReport:
    """The rows of the matrix, and the sizes it was computed on."""

    rows: tuple[VerifyRow, ...]
    batch: int
    length: int

    @property
    def ok(self) -> bool:
        """Whether every row is."""
        return all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        rows = [{**row._asdict(), "ok": row.ok} for row in self.rows]
        return {"ok": self.ok, "batch": self.batch, "length": self.length, "rows": rows}

    def __repr__(self) -> str:
        verdict = "ok" if self.ok else "NOT EQUAL"
        lines = [
            f"VerifyReport: {verdict}, {self.batch} x {self.length} tokens",
            f"  {'way':<20}{'dtype':<10}{'logits':>9}{'state':>9}{'limit':>9}  first other token",
        ]
        for row in self.rows:
            errors = "".join(f"{_number(error):>9}" for error in (row.error, row.state_error))
            last = "none" if row.diverges_at is None else f"at {row.diverges_at}"
            last = last + ("" if row.ok else "  FAILS") if row.ran else "did not run"
            lines.append(f"  {row.way:<20}{row.dtype:<10}{errors}{row.tolerance:>9.0e}  {last}")
        notes = (
            fill(note, 80, initial_indent="  ", subsequent_indent="    ") for note in self.notes
        )
        return "\n".join([*lines, *notes])

    @property
    def notes(self) -> list[str]:
        """Why some ways did not run, each reason once."""
        notes = [
            f"{row.way}: {row.note.removeprefix(f'impl={row.way!r} ')}"
            for row in self.rows
            if row.note
        ]
        return list(dict.fromkeys(notes))


def _number(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"
