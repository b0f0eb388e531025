"""Documents whose tokens say where they come from, for judging order and borders."""

from collections.abc import Sequence
from pathlib import Path

from anymamba.train import Document, TokenStore, open_store, write_store

START, END = 1, 0


class NumberTokenizer:
    """Every number of a text is the token of that id; 1 begins a text and 0 ends it."""

    vocab_size = 100_000
    eos_id: int | None = END
    bos_id: int | None = START

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def token(document: int, place: int) -> int:
    """Return the token at a place of a document; no other place has it."""
    return (document + 1) * 1000 + place


def number_store(folder: Path, lengths: Sequence[int], shard_bytes: int = 64) -> TokenStore:
    """Write documents of the given lengths into small shards, and open them."""
    documents = [
        Document(f"{number}", " ".join(str(token(number, t)) for t in range(length)).encode())
        for number, length in enumerate(lengths)
    ]
    write_store(folder, documents, NumberTokenizer(), shard_bytes=shard_bytes)
    return open_store(folder)
