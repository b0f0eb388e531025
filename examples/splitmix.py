"""SplitMix64: a random generator of four lines, the same numbers in every language.

Data sets that are made of it are data sets that anybody can make again, without a file and without
torch's own generator, whose numbers belong to a version of torch.
"""

WORD = (1 << 64) - 1


class SplitMix64:
    """Whole numbers from a seed.

    Example:
        >>> SplitMix64(0).next() == 0xE220A8397B1DCDAF
        True
    """

    def __init__(self, seed: int) -> None:
        """Start from a seed; only its low 64 bits count."""
        self.state = seed & WORD

    def next(self) -> int:
        """Return the next 64 bits."""
        self.state = (self.state + 0x9E3779B97F4A7C15) & WORD
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        return z ^ (z >> 31)

    def below(self, bound: int) -> int:
        """Return a number of 0, 1, ..., bound - 1."""
        return self.next() % bound

    def shuffle(self, items: list[int]) -> list[int]:
        """Return the items in another order, from the last place to the first (Fisher-Yates)."""
        items = list(items)
        for place in range(len(items) - 1, 0, -1):
            other = self.below(place + 1)
            items[place], items[other] = items[other], items[place]
        return items
