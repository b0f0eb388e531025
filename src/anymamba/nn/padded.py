"""Registers in a padded batch: each row gets its own, placed by its own length."""

from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.errors import ConfigError
from anymamba.nn.registers import Registers

__all__ = ["Places", "insert_padded", "register_places"]

ABSENT = -1


class Places(NamedTuple):
    """Where things stand in the output; rows of equal lengths share one row of this table.

    Attributes:
        source_bs: what stands in each place: token t as t, register r as length + r, padding as
            one more.
        tokens_bs: the place of each token; some padding for those that are not there.
        registers_br: the place of each register; ABSENT where it has no token to precede.
    """

    source_bs: Tensor
    tokens_bs: Tensor
    registers_br: Tensor

    def landed(self, where: str) -> Tensor:
        """Return the places of the registers; raises if one is absent."""
        if bool((self.registers_br == ABSENT).any()):
            raise ConfigError(
                f"{where}: every register must stand in every sequence; a custom one lies beyond "
                "the end of some. Use longer sequences, or start, middle and end."
            )
        return self.registers_br


def register_places(
    registers: Registers, length: int, lengths_b: Tensor | None, device: torch.device
) -> Places:
    """Return where tokens and registers stand.

    Args:
        registers: one level of them.
        length: places of the input.
        lengths_b: tokens of each row; None if all rows are whole.
        device: of the result.

    Example:
        >>> from anymamba.nn import Marker
        >>> registers = Registers([Marker.end()], 4)
        >>> register_places(registers, 3, torch.tensor([2, 3]), torch.device("cpu")).tokens_bs
        tensor([[0, 1, 3],
                [0, 1, 2]])
    """
    rows = [length] if lengths_b is None else lengths_b.tolist()
    made = {row: _row(registers, row, length) for row in sorted(set(rows))}
    columns = zip(*(made[row] for row in rows), strict=True)
    return Places(*(torch.tensor(list(column), device=device) for column in columns))


def insert_padded(
    registers: Registers, x_bsd: Tensor, lengths_b: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the batch with its registers, and the new lengths.

    Args:
        registers: one level of them.
        x_bsd: the batch.
        lengths_b: tokens of each row; None if all rows are whole.
    """
    batch, length, width = x_bsd.shape
    if lengths_b is None:
        return registers.insert(x_bsd, 0, length)[0].into(x_bsd), None
    source_bs = register_places(registers, length, lengths_b, x_bsd.device).source_bs
    rows = registers.table.to(x_bsd.dtype).expand(batch, -1, -1)
    offered_bsd = torch.cat([x_bsd, rows, x_bsd.new_zeros(batch, 1, width)], dim=1)
    y_bsd = offered_bsd.gather(1, source_bs[..., None].expand(-1, -1, width))
    return y_bsd, (source_bs != length + rows.shape[1]).sum(1)


def _row(registers: Registers, tokens: int, length: int) -> tuple[list[int], list[int], list[int]]:
    """Return one row of each table of `Places`."""
    insertion, _ = registers.insert(torch.empty(1, tokens, 0), 0, tokens)
    source: list[int] = []
    taken = 0
    for before, row in insertion.places:
        source += [*range(taken, before), length + row]
        taken = before
    source += range(taken, tokens)
    width = registers.length_after(length)
    assert width is not None
    count = len(registers.markers)
    source += [length + count] * (width - len(source))
    place = {what: where for where, what in enumerate(source)}
    # As many registers land in the whole width as in any row, so these places are padding.
    found = [place[t] if t < tokens else t + width - length for t in range(length)]
    return source, found, [place.get(length + row, ABSENT) for row in range(count)]
