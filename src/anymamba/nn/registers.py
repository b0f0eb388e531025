"""Registers: learnable rows that a model inserts into the sequence it receives.

A marker says where a row goes, for a sequence of L tokens. Start stands before token 0, middle
before token floor(L / 2), custom(k) before token k, end after the last token. Among markers before
the same token the order is start, middle, end, custom, then the order of the list. A custom(k) with
k >= L has no token to precede and does not land.

Registers can enter at several levels: before a stack, and again before any layer of it. A level
knows only how many rows it has handed on, its cursor; with that number and L, any splitting of the
sequence into pieces and steps gives the rows of the whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anymamba.errors import ConfigError

__all__ = ["Cursor", "Marker", "RegisterConfig", "Registers"]

KINDS = ("start", "middle", "end", "custom")
# Longer than any sequence: the length of a stream whose end is not announced.
ENDLESS = 1 << 62


class Cursor(NamedTuple):
    """How far a stream has come: its announced length, and the rows each level has handed on."""

    length: int | None
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Marker:
    """Where a register stands in the sequence.

    Args:
        kind: "start", "middle", "end" or "custom".
        index: the token that a custom register precedes; None for the other kinds.
    """

    kind: str
    index: int | None = None

    def __post_init__(self) -> None:
        """Check the kind, and that exactly custom markers have an index."""
        if self.kind not in KINDS:
            raise ConfigError(f"Marker: kind must be one of {', '.join(KINDS)}; got {self.kind!r}.")
        if (self.kind == "custom") != (self.index is not None):
            raise ConfigError(
                f"Marker: custom markers have an index and others have none; got {self}."
            )
        if self.index is not None and self.index < 0:
            raise ConfigError(f"Marker: index must not be negative; got {self.index}.")

    @classmethod
    def start(cls) -> "Marker":
        """Return a marker before the first token."""
        return cls("start")

    @classmethod
    def middle(cls) -> "Marker":
        """Return a marker before token floor(length / 2)."""
        return cls("middle")

    @classmethod
    def end(cls) -> "Marker":
        """Return a marker after the last token."""
        return cls("end")

    @classmethod
    def custom(cls, index: int) -> "Marker":
        """Return a marker before token `index`."""
        return cls("custom", index)

    def token(self, length: int | None) -> int:
        """Return the token this marker precedes; `length` for the end."""
        if self.kind == "start":
            return 0
        if self.index is not None:
            return self.index
        if length is None:
            raise ConfigError(
                f"Registers: a {self.kind} marker needs the length of the whole sequence; it was "
                "not announced. Pass length= to empty_cache, prefill or prime, or use forward."
            )
        return length // 2 if self.kind == "middle" else length


@dataclass(frozen=True, kw_only=True)
class RegisterConfig:
    """Registers of a stack.

    Args:
        stack: markers of the rows that enter below the first layer.
        layers: markers by real layer; its rows enter below that layer, at every virtual pass.
    """

    stack: Sequence[Marker] = ()
    layers: Mapping[int, Sequence[Marker]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that there is a register, and that every entry is a marker."""
        # Lists, and no empty ones: equal configs stay equal through JSON.
        layers = {place: list(group) for place, group in self.layers.items() if group}
        object.__setattr__(self, "stack", list(self.stack))
        object.__setattr__(self, "layers", layers)
        groups = [self.stack, *self.layers.values()]
        if not any(groups):
            raise ConfigError("RegisterConfig: there must be a register; got none. Use None.")
        for marker in (marker for group in groups for marker in group):
            if not isinstance(marker, Marker):
                raise ConfigError(
                    f"RegisterConfig: every entry must be a Marker; got {type(marker).__name__}."
                )

    @classmethod
    def from_dict(cls, entries: dict[str, Any]) -> "RegisterConfig":
        """Build from the plain values that JSON holds; its keys of layers are strings."""
        stack = [Marker(**entry) for entry in entries.get("stack", ())]
        layers = {
            int(place): [Marker(**entry) for entry in group]
            for place, group in entries.get("layers", {}).items()
        }
        return cls(stack=stack, layers=layers)


class Insertion(NamedTuple):
    """Rows to insert into one piece: before which token of the piece, and which row."""

    places: tuple[tuple[int, int], ...]
    table: Tensor

    def into(self, x: Tensor) -> Tensor:
        """Return (batch, sequence, ..., width) with the rows in their places."""
        batch, rest = x.shape[0], x.shape[2:]
        pieces, taken = [], 0
        for place, row in self.places:
            pieces += [x[:, taken:place], self.table[row].to(x.dtype).expand(batch, 1, *rest)]
            taken = place
        pieces.append(x[:, taken:])
        if not self.places:
            if not (torch.is_grad_enabled() and self.table.requires_grad):
                return x
            # No row lands in this piece: an empty one gives the table its gradient of zero, so that
            # replicas with sequences of different lengths agree on which parameters were used.
            pieces.append(self.table[0].to(x.dtype).expand(batch, 0, *rest))
        return torch.cat(pieces, dim=1)

    def zeros_into(self, x: Tensor) -> Tensor:
        """Return x with rows of zeros in the same places."""
        return Insertion(self.places, torch.zeros_like(self.table)).into(x)


class Registers(nn.Module):
    """One level of registers: a table of learnable rows and where each one stands.

    Args:
        markers: one per row.
        width: of a row.
        device: of the table.
        dtype: of the table.

    Example:
        >>> registers = Registers([Marker.start(), Marker.end()], 8)
        >>> registers.positions(3)
        [0, 4]
        >>> registers.insert(torch.zeros(2, 3, 8), 0, 3)[0].into(torch.zeros(2, 3, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        markers: Sequence[Marker],
        width: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Draw the table with deviation 0.02."""
        super().__init__()
        self.markers = tuple(markers)
        self.table = nn.Parameter(torch.empty(len(self.markers), width, device=device, dtype=dtype))
        nn.init.normal_(self.table, std=0.02)

    def extra_repr(self) -> str:
        """Name the places."""
        kinds = [m.kind if m.index is None else f"custom({m.index})" for m in self.markers]
        return f"{', '.join(kinds)}, width={self.table.shape[1]}"

    def positions(self, length: int | None) -> list[int]:
        """Return where each row stands in the output for a sequence of `length` tokens.

        A custom register that does not land is given the place it would have in a longer sequence.

        Args:
            length: tokens of the whole sequence; None if it has no announced end.

        Raises:
            ConfigError: a middle or an end, and no length.
        """
        tokens = [marker.token(length) for marker in self.markers]
        order = sorted(
            range(len(tokens)), key=lambda i: (tokens[i], KINDS.index(self.markers[i].kind), i)
        )
        places = [0] * len(tokens)
        for before, i in enumerate(order):
            places[i] = before + min(tokens[i], ENDLESS if length is None else length)
        return places

    def length_after(self, length: int | None) -> int | None:
        """Return the length of the sequence with its registers, which is what the next level sees.

        Custom registers that do not land are not counted.
        """
        if length is None:
            return None
        landed = sum(m.kind == "end" or m.token(length) < length for m in self.markers)
        return length + landed

    def insert(
        self, x: Tensor, offset: int, length: int | None, *, is_prime: bool = False
    ) -> tuple[Insertion, int]:
        """Say which rows go into the next piece of a sequence.

        Args:
            x: the piece; (batch, sequence, width), the sequence may be empty.
            offset: rows this level has handed on before, registers included.
            length: tokens of the whole sequence; None if it has no announced end.
            is_prime: the piece ends where the next token is awaited, so the rows that stand before
                that token are due now; otherwise they wait for it.

        Returns:
            The insertion, and the offset after the piece.
        """
        places = self.positions(length)
        count = x.shape[1]
        tokens_seen = offset - sum(place < offset for place in places) + count
        is_at_end = length is not None and tokens_seen == length
        rows: list[tuple[int, int]] = []
        handed_on, taken = offset, 0
        for row in sorted(range(len(places)), key=places.__getitem__):
            if places[row] < offset:
                continue
            before = taken + places[row] - handed_on
            is_end = self.markers[row].kind == "end"
            # Behind the piece's last token: an end if this is the end, others if they are due.
            is_due = (not is_prime and is_at_end) if is_end else (is_prime and not is_at_end)
            if before > count or (before == count and not is_due):
                break
            rows.append((before, row))
            taken, handed_on = before, places[row] + 1
        return Insertion(tuple(rows), self.table), handed_on + count - taken
