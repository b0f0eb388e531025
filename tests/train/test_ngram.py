"""Laws of the yardstick: it is Witten-Bell, it is a distribution, and it is fast."""

import math
import random
import time
from collections import Counter, defaultdict

import pytest
import torch

from anymamba.errors import ConfigError
from anymamba.train import WittenBell, byte_piece

MARK = 256


def by_the_book(order: int, train: list[bytes], text: bytes) -> float:
    """Return the bits of a text from the recursive formula, with dictionaries."""
    counts: dict[tuple[int, ...], Counter] = defaultdict(Counter)
    for document in train:
        row = [*[-1] * (order - 2), MARK, *document, MARK]
        for t in range(max(1, order - 1), len(row)):
            for length in range(order):
                counts[tuple(row[t - length : t])][row[t]] += 1

    def chance(symbol: int, context: tuple[int, ...]) -> float:
        shorter = 1 / 257 if not context else chance(symbol, context[1:])
        seen = counts.get(context)
        if seen is None:
            return shorter
        return (seen[symbol] + len(seen) * shorter) / (seen.total() + len(seen))

    row = [*[-1] * (order - 2), MARK, *text, MARK]
    places = range(max(1, order - 1), len(row))
    return -sum(math.log2(chance(row[t], tuple(row[t - order + 1 : t]))) for t in places)


@pytest.mark.parametrize("order", [1, 2, 3, 5, 7])
def test_equal_to_the_formula(order):
    """Counting with sorted keys gives the bits of the recursive formula."""
    train = [b"the cat sat on the mat", b"the dog", b"aaaaaaaaaa", bytes(range(256))]
    model = WittenBell(order).fit(map(byte_piece, train))
    for text in (b"the cat", b"the dog sat", b"zzz", b"a", bytes([255, 0, 255])):
        expected = by_the_book(order, train, text)
        assert model.bits([byte_piece(text)]) == pytest.approx(expected, rel=1e-12)


def test_chances_sum_to_one():
    """After any context, seen or not, the 257 symbols share a chance of one."""
    model = WittenBell(4).fit([byte_piece(b"abracadabra"), byte_piece(b"abba")])
    for context in ([MARK], [97, 98, 114], [122, 97, 98]):
        ids_s = torch.tensor(context)
        known = model.bits([(ids_s[:-1], ids_s[1:])]) if len(context) > 1 else 0.0
        total = 0.0
        for symbol in range(257):
            targets_s = torch.tensor([*context[1:], symbol])
            total += 2 ** (known - model.bits([(ids_s, targets_s)]))
        assert total == pytest.approx(1.0, rel=1e-9)


def test_pieces_do_not_see_each_other():
    """The bits of several documents are the sum of each one's own."""
    model = WittenBell().fit([byte_piece(b"hello world"), byte_piece(b"help")])
    pieces = [byte_piece(text) for text in (b"hell", b"o world", b"word")]
    apart = sum(model.bits([piece]) for piece in pieces)
    assert model.bits(pieces) == pytest.approx(apart, rel=1e-12)
    joined = WittenBell().fit([byte_piece(b"hello worldhelp")])
    assert joined.bits(pieces) != pytest.approx(model.bits(pieces), rel=1e-3)


def test_the_beginning_of_a_piece_is_not_the_beginning_of_a_document():
    """After `a` at the head of a document came `b`; after `a` at the head of a later part, `c`."""
    part = torch.tensor([97]), torch.tensor([99])
    model = WittenBell(3).fit([byte_piece(b"ab"), part])
    first = torch.tensor([MARK]), torch.tensor([97])
    both = torch.tensor([MARK, 97]), torch.tensor([97, 98])
    in_document = model.bits([both]) - model.bits([first])
    in_part = model.bits([(torch.tensor([97]), torch.tensor([98]))])
    assert in_document < in_part - 0.5


def test_a_source_without_structure_costs_what_it_must():
    """Random letters of an alphabet of 16 cost four bits each, and a repeated one almost none."""
    letters = random.Random(0).choices(b"abcdefghijklmnop", k=40_000)
    train, rest = bytes(letters[:30_000]), bytes(letters[30_000:])
    model = WittenBell(2).fit([byte_piece(train)])
    assert model.bits([byte_piece(rest)]) / len(rest) == pytest.approx(4.0, abs=0.02)
    steady = WittenBell().fit([byte_piece(b"ab" * 5000)])
    assert steady.bits([byte_piece(b"ab" * 500)]) / 1000 < 0.05


def test_more_text_of_the_kind_costs_fewer_bits():
    """What the model was shown, it predicts better than what it was not."""
    text = b"def function(argument):\n    return argument\n"
    little = WittenBell().fit([byte_piece(b"lorem ipsum dolor sit amet")])
    more = WittenBell().fit([byte_piece(b"lorem ipsum dolor sit amet"), byte_piece(text)])
    assert more.bits([byte_piece(text)]) < 0.5 * little.bits([byte_piece(text)])


def test_rejects_mistakes():
    """Orders that do not fit, no text, no counts and tokens that are no bytes are refused."""
    for order in (0, 8):
        with pytest.raises(ConfigError, match=r"order must lie in 1\.\.7"):
            WittenBell(order)
    with pytest.raises(ConfigError, match="at least one piece"):
        WittenBell().fit([])
    with pytest.raises(ConfigError, match="Call fit first"):
        WittenBell().bits([byte_piece(b"a")])
    with pytest.raises(ConfigError, match="must be bytes or the mark 256; got 257"):
        WittenBell().fit([(torch.tensor([1, 257]), torch.tensor([2, 3]))])
    with pytest.raises(ConfigError, match="must be bytes or the mark 256; got -100"):
        WittenBell().fit([(torch.tensor([1, 2]), torch.tensor([2, -100]))])


@pytest.mark.slow
def test_three_megabytes_take_less_than_twenty_seconds():
    """Counting 3 MB and asking 1 MB is fast enough to end a demonstration with."""
    words = [random.Random(n).randbytes(random.Random(n).randint(1, 9)) for n in range(5000)]
    chosen = random.Random(1).choices(words, k=800_000)
    text = b" ".join(chosen)[:4_000_000]
    begin = time.perf_counter()
    model = WittenBell().fit([byte_piece(text[:3_000_000])])
    model.bits([byte_piece(text[3_000_000:])])
    assert time.perf_counter() - begin < 20
