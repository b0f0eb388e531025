"""Which layer runs when: many virtual layers over few sets of weights.

A schedule is a tuple of indices: entry v says which real layer the virtual layer v uses. With V
virtual and R real layers:

| schedule | entry v | V=8, R=3 |
|---|---|---|
| cyclic | v mod R | 0 1 2 0 1 2 0 1 |
| stretched | floor(v R / V) | 0 0 0 1 1 1 2 2 |

In a bidirectional stack, even entries run straight and odd ones reversed. With o = floor(v / 2) and
O = V / 2 pairs, E even and R - E odd real layers:

| schedule | pair o | V=10, R=4 |
|---|---|---|
| strided_cyclic | 2 (o mod E), 2 (o mod (R - E)) + 1 | 0 1 2 3 0 1 2 3 0 1 |
| strided_stretched | 2 floor(o E / O), 2 floor(o (R - E) / O) + 1 | 0 1 0 1 0 1 2 3 2 3 |
| symmetric_cyclic | o mod R, twice | 0 0 1 1 2 2 3 3 0 0 |
| symmetric_stretched | floor(o R / O), twice | 0 0 0 0 1 1 2 2 3 3 |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from anymamba.errors import ConfigError

__all__ = ["VirtualLayers", "make_bidirectional_schedule", "make_schedule"]

# Far above any model; a config that asks for more is a mistake, and would fill the memory first.
MOST_LAYERS = 65536
SCHEDULES = ("cyclic", "stretched")
BIDIRECTIONAL_SCHEDULES = (
    "strided_cyclic",
    "strided_stretched",
    "symmetric_cyclic",
    "symmetric_stretched",
)


@dataclass(frozen=True)
class VirtualLayers:
    """How many layers a token passes, and which weights each of them uses.

    Args:
        count: number of virtual layers, at most 65536; each has a state of its own.
        schedule: a name from the table above, or the list of real layers, one per virtual layer.

    Example:
        >>> VirtualLayers(8, "stretched").indices(3)
        (0, 0, 0, 1, 1, 1, 2, 2)
    """

    count: int
    schedule: str | Sequence[int] = "cyclic"

    def __post_init__(self) -> None:
        """Check the count; keep the schedule as a list: equal configs stay equal through JSON."""
        _check_counts("VirtualLayers", count=self.count)
        if not isinstance(self.schedule, str):
            object.__setattr__(self, "schedule", list(self.schedule))

    def indices(self, real: int) -> tuple[int, ...]:
        """Return the real layer of each virtual one; see `make_schedule`."""
        return make_schedule(self.schedule, self.count, real)


def make_schedule(schedule: str | Sequence[int], virtual: int, real: int) -> tuple[int, ...]:
    """Return the real layer of each virtual layer.

    Args:
        schedule: "cyclic", "stretched", or the list itself.
        virtual: number of virtual layers.
        real: number of real layers; each must be used.

    Raises:
        ConfigError: an unknown name, a list of another length, an index out of range, or a layer
            that no virtual layer uses.

    Example:
        >>> make_schedule("cyclic", 8, 3)
        (0, 1, 2, 0, 1, 2, 0, 1)
    """
    where = "make_schedule"
    _check_counts(where, virtual=virtual, real=real)
    if not isinstance(schedule, str):
        indices = tuple(schedule)
    elif schedule == "cyclic":
        indices = tuple(v % real for v in range(virtual))
    elif schedule == "stretched":
        indices = tuple(v * real // virtual for v in range(virtual))
    else:
        _refuse_name(where, schedule, SCHEDULES)
    return _checked(where, indices, virtual, real)


def make_bidirectional_schedule(
    schedule: str | Sequence[int], virtual: int, real: int
) -> tuple[int, ...]:
    """Return the real layer of each virtual layer of a bidirectional stack.

    Args:
        schedule: a name from the second table above, or the list itself.
        virtual: number of virtual layers, both directions counted; even.
        real: number of real layers; each must be used.

    Raises:
        ConfigError: as `make_schedule`, or `virtual` is odd.

    Example:
        >>> make_bidirectional_schedule("symmetric_cyclic", 6, 2)
        (0, 0, 1, 1, 0, 0)
    """
    where = "make_bidirectional_schedule"
    _check_counts(where, virtual=virtual, real=real)
    if virtual % 2:
        raise ConfigError(f"{where}: layers come in pairs, so virtual must be even; got {virtual}.")
    if not isinstance(schedule, str):
        return _checked(where, tuple(schedule), virtual, real)
    if schedule not in BIDIRECTIONAL_SCHEDULES:
        _refuse_name(where, schedule, BIDIRECTIONAL_SCHEDULES)
    pairs = virtual // 2
    placing, _, rule = schedule.partition("_")

    def chosen(pair: int, among: int) -> int:
        return pair % among if rule == "cyclic" else pair * among // pairs

    indices: list[int] = []
    for pair in range(pairs):
        if placing == "symmetric":
            indices += [chosen(pair, real)] * 2
        elif real < 2:
            raise ConfigError(f"{where}: {schedule!r} needs at least 2 real layers; got {real}.")
        else:
            straight, reverse = chosen(pair, real - real // 2), chosen(pair, real // 2)
            indices += [2 * straight, 2 * reverse + 1]
    return _checked(where, tuple(indices), virtual, real)


def _check_counts(where: str, **counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or not 1 <= count <= MOST_LAYERS:
            raise ConfigError(
                f"{where}: {name} must be a whole number in 1..{MOST_LAYERS}; got {count!r}."
            )


def _refuse_name(where: str, given: str, known: Sequence[str]) -> NoReturn:
    raise ConfigError(
        f"{where}: a schedule must be one of {', '.join(known)}, or a list of layers; "
        f"got {given!r}."
    )


def _checked(where: str, indices: tuple[int, ...], virtual: int, real: int) -> tuple[int, ...]:
    if len(indices) != virtual:
        raise ConfigError(
            f"{where}: the list must have one entry for each of {virtual} virtual layers; "
            f"got {len(indices)}."
        )
    if wrong := [x for x in indices if not isinstance(x, int) or not 0 <= x < real]:
        raise ConfigError(f"{where}: entries must lie in 0..{real - 1}; got {wrong[0]!r}.")
    if idle := sorted(set(range(real)) - set(indices)):
        raise ConfigError(
            f"{where}: every layer must be used, or its weights would never train; "
            f"{virtual} virtual layers leave out {idle}. Use more virtual or fewer real layers."
        )
    return indices
