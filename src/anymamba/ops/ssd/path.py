"""Which SSD algorithm runs, and how long its chunks are."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from anymamba.errors import ConfigError

__all__ = ["Mamba2SsdPath", "Mamba3SsdPath", "SsdPath"]

KINDS = ("minimal", "serial", "serial_recalculated")


class _HasSizes(Protocol):
    d_state: int
    headdim: int


class _Bundle(Protocol):
    def run(self, path: "SsdPath") -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class SsdPath:
    """An SSD algorithm with an optional chunk length; all algorithms give the same numbers.

    | kind | inside a chunk | between chunks | backward |
    |---|---|---|---|
    | `minimal` | matrix products | one matrix product over all chunks | autograd |
    | `serial` | matrix products | loop over chunks | autograd |
    | `serial_recalculated` | matrix products | loop over chunks | recomputes from the inputs |

    Example:
        >>> SsdPath.serial(64)
        SsdPath.serial(64)
        >>> SsdPath().kind, SsdPath().chunk_len_or_optimal(128, 64)
        ('serial_recalculated', 96)
    """

    kind: str = "serial_recalculated"
    chunk_len: int | None = None

    def __post_init__(self) -> None:
        """Check the algorithm's name and the chunk length."""
        if self.kind not in KINDS:
            raise ConfigError(f"SsdPath: kind must be one of {KINDS}; got {self.kind!r}.")
        if self.chunk_len is not None and (
            not isinstance(self.chunk_len, int) or self.chunk_len < 1
        ):
            raise ConfigError(
                f"SsdPath: chunk_len must be a whole number of at least 1; got {self.chunk_len}."
            )

    def __repr__(self) -> str:
        """Write the path as the call that makes it."""
        return f"SsdPath.{self.kind}({'' if self.chunk_len is None else self.chunk_len})"

    @classmethod
    def minimal(cls, l: int | None = None) -> "SsdPath":
        """Batched matrix products only; transparent to compilers.

        The states of all chunks meet in one product, so a NaN spreads to every token, earlier ones
        and other packed sequences included; the serial algorithms keep it where it is.
        """
        return cls("minimal", l)

    @classmethod
    def serial(cls, l: int | None = None) -> "SsdPath":
        """Stages K1 to K5 with a loop over chunks; autograd keeps every intermediate."""
        return cls("serial", l)

    @classmethod
    def serial_recalculated(cls, l: int | None = None) -> "SsdPath":
        """The serial forward with a backward that recomputes everything from the inputs."""
        return cls("serial_recalculated", l)

    @staticmethod
    def optimal_default(r: int, p: int) -> int:
        """Return the chunk length that balances the work: sqrt(r * p), rounded up to 32.

        Example:
            >>> [SsdPath.optimal_default(r, p) for r, p in [(128, 64), (8, 8), (1024, 512)]]
            [96, 32, 512]
        """
        return min(512, -(-math.isqrt(r * p) // 32) * 32)

    def chunk_len_or_optimal(self, r: int, p: int) -> int:
        """Return the chunk length given, or the optimal one for these sizes."""
        return self.optimal_default(r, p) if self.chunk_len is None else self.chunk_len

    @classmethod
    def core_optimal(cls, r: int, p: int) -> "SsdPath":
        """Return `minimal` with the optimal chunk length."""
        return cls.minimal(cls.optimal_default(r, p))

    @classmethod
    def chunked_optimal(cls, r: int, p: int) -> "SsdPath":
        """Return `serial` with the optimal chunk length."""
        return cls.serial(cls.optimal_default(r, p))

    @classmethod
    def chunked_recalculated_optimal(cls, r: int, p: int) -> "SsdPath":
        """Return `serial_recalculated` with the optimal chunk length."""
        return cls.serial_recalculated(cls.optimal_default(r, p))

    @classmethod
    def core_optimal_from_block(cls, block: _HasSizes) -> "SsdPath":
        """Return `minimal` with the optimal chunk length for a block's sizes."""
        return cls.core_optimal(block.d_state, block.headdim)

    @classmethod
    def chunked_optimal_from_block(cls, block: _HasSizes) -> "SsdPath":
        """Return `serial` with the optimal chunk length for a block's sizes."""
        return cls.chunked_optimal(block.d_state, block.headdim)

    @classmethod
    def chunked_recalculated_optimal_from_block(cls, block: _HasSizes) -> "SsdPath":
        """Return `serial_recalculated` with the optimal chunk length for a block's sizes."""
        return cls.chunked_recalculated_optimal(block.d_state, block.headdim)

    def run(self, input: _Bundle) -> tuple[Tensor, Tensor]:
        """Run an input bundle by this algorithm; its tensors already fix the chunks."""
        return input.run(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the call that makes it."""
        return SsdPath, (self.kind, self.chunk_len)


Mamba2SsdPath = SsdPath
Mamba3SsdPath = SsdPath
