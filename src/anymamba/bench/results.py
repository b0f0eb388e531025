"""What a run of the bench found, and where it belongs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anymamba.bench.budget import Promise, promises
from anymamba.bench.decode import Decoding
from anymamba.bench.decode_budget import decode_promises
from anymamba.bench.growth import Growth, Threads
from anymamba.bench.machine import Machine, Rates
from anymamba.bench.measure import Row
from anymamba.bench.profile import Profile
from anymamba.bench.training_memory import TrainingMemory
from anymamba.bench.words import dtype_name

__all__ = ["Report"]


@dataclass(kw_only=True)
class Report:
    """What was measured, on which machine."""

    machine: Machine
    rates: Rates
    quick: bool = False
    rows: list[Row] = field(default_factory=list)
    memory: list[TrainingMemory] = field(default_factory=list)
    decoding: list[Decoding] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)
    threads: list[Threads] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)

    @property
    def red(self) -> list[Row]:
        """Rows that disagree with the reference."""
        return [row for row in self.rows if not row.ok]

    @property
    def wrong(self) -> list[str]:
        """What disagrees with the reference, or a decoder with its modules."""
        return [
            *(f"{row.case.title} ({row.way})" for row in self.red),
            *(f"{x.model}, {x.length} tokens ({x.way})" for x in self.memory if not x.ok),
            *(
                f"{x.model}, {x.format}, decoding {x.rows} ({x.engine})"
                for x in self.decoding
                if not x.ok
            ),
        ]

    @property
    def promises(self) -> list[Promise]:
        """The lines of the budget that were measured."""
        return [
            *promises(self.rows, self.growth, self.threads, self.rates),
            *decode_promises(self.decoding),
        ]

    def add(self, piece: "Report") -> None:
        """Take over what was measured in a piece."""
        for name in ("rows", "memory", "decoding", "growth", "threads", "profiles"):
            getattr(self, name).extend(getattr(piece, name))

    def only(self, group: str) -> "Report":
        """Return what belongs to one group of cases."""

        def of(name: str, found: Sequence[Any]) -> list[Any]:
            return list(found) if group == name else []

        return replace(
            self,
            rows=[row for row in self.rows if row.case.group == group],
            memory=of("memory", self.memory),
            decoding=of("decode", self.decoding),
            growth=of("growth", self.growth),
            threads=of("growth", self.threads),
            profiles=of("profile", self.profiles),
        )

    def share_of_ideal(self, row: Row) -> float | None:
        """Return the ideal time over the measured one."""
        if row.timing is None:
            return None
        ideal = row.work.seconds(self.rates.limit(row.case.dtype), self.rates.bandwidth)
        return ideal / row.timing.median

    def over_portable(self, row: Row) -> float | None:
        """Return how many times as fast as the portable path a way is."""
        portable = next((x for x in self.rows if x.case is row.case and x.way == "portable"), None)
        if row.timing is None or portable is None or portable.timing is None:
            return None
        return portable.timing.median / row.timing.median

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "machine": self.machine._asdict(),
            "quick": self.quick,
            "rates": self.rates.to_dict(),
            "rows": [self._row(row) for row in self.rows],
            "budget": [{**promise._asdict(), "met": promise.met} for promise in self.promises],
            "memory": [{**figure._asdict(), "ok": figure.ok} for figure in self.memory],
            "decoding": [_decoding(figure) for figure in self.decoding],
            "growth": [figure._asdict() for figure in self.growth],
            "threads": [figure._asdict() for figure in self.threads],
            "profiles": [profile._asdict() for profile in self.profiles],
        }

    def _row(self, row: Row) -> dict[str, Any]:
        case, timing = row.case, row.timing
        return {
            "group": case.group,
            "case": case.name,
            "mode": case.mode,
            "dtype": dtype_name(case.dtype),
            "way": row.way,
            "note": row.note,
            "ok": row.ok,
            "error": _finite(row.error),
            "limit": row.limit,
            "why_not": row.why_not,
            "seconds": timing and timing.median,
            "quartiles": timing and [timing.low, timing.high],
            "runs": timing.runs if timing else 0,
            "tokens_per_second": row.tokens_per_second,
            "peak_bytes": (row.peak or None) if timing else None,
            "share_of_ideal": self.share_of_ideal(row),
            "over_portable": self.over_portable(row),
        }


def _decoding(figure: Decoding) -> dict[str, Any]:
    ran = bool(figure.seconds)
    return {
        "model": figure.model,
        "engine": figure.engine,
        "format": figure.format,
        "rows": figure.rows,
        "ok": figure.ok,
        "error": _finite(figure.error) if ran else None,
        "why_not": figure.why_not or None,
        "seconds": figure.median if ran else None,
        "slowest_hundredth": figure.tail if ran else None,
        "tokens_per_second": figure.tokens_per_second if ran else None,
        "bytes_per_token": figure.bytes_per_token if ran else None,
        "bandwidth": figure.bandwidth if ran else None,
        "share_of_ideal": figure.share if ran else None,
    }


def _finite(error: float | None) -> float | str | None:
    """Return an error for JSON, which has no number for infinity."""
    return "inf" if error == float("inf") else error
