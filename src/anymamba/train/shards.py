"""Tokens on disk: written once, checked, then read through memory maps.

    index.json         sizes, marks, the fingerprint of the sources, checksums; written last
    documents.bin      tokens and bytes of each document, as 64-bit numbers
    tokens-00000.bin   documents end to end, 1, 2 or 4 bytes per token; none lies in two files

Numbers are little endian. Files appear whole or not at all, and a folder without its index is
nothing, so a build that was killed is simply done again.
"""

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anymamba.errors import CheckpointError, ConfigError
from anymamba.io import ByteTokenizer, Tokenizer, read_json, replacing, write_json
from anymamba.train.corpus import Document
from anymamba.train.spans import Span

__all__ = ["TokenStore", "fingerprint_of", "open_store", "write_store"]

FORMAT = 1
INDEX, TABLE = "index.json", "documents.bin"
SHARD_BYTES = 2**28


class TokenStore:
    """The tokens of a corpus, document by document, without being in memory.

    Args:
        folder: what `write_store` wrote.
        index: the content of its index.
        lengths_q: tokens of each document.
        bytes_q: bytes of each document's text.
    """

    def __init__(
        self, folder: Path, index: dict[str, Any], lengths_q: Tensor, bytes_q: Tensor
    ) -> None:
        """Map the token files."""
        self.lengths_q, self.bytes_q = lengths_q, bytes_q
        self.fingerprint: str = index["fingerprint"]
        self.vocab_size: int = index["vocab_size"]
        self.start_id: int = index["start_id"]
        self.end_id: int = index["end_id"]
        self._width: int = index["width"]
        self._maps = [_map(folder / entry["name"], entry["bytes"]) for entry in index["shards"]]
        # Where each document begins, counted in tokens over all shards; and each shard.
        self._begin_q = lengths_q.cumsum(0) - lengths_q
        sizes = [len(part) // self._width for part in self._maps]
        self._shard_begin = torch.tensor([0, *accumulate(sizes)])

    def __len__(self) -> int:
        return len(self.lengths_q)

    def __repr__(self) -> str:
        return (
            f"TokenStore({len(self)} documents, {int(self.lengths_q.sum())} tokens, "
            f"{int(self.bytes_q.sum())} bytes)"
        )

    def tokens(self, document: int, begin: int = 0, end: int | None = None) -> Tensor:
        """Return tokens `begin <= t < end` of a document, without marks; int64."""
        if not self._maps:
            raise CheckpointError("TokenStore: the token files are closed. Open the store again.")
        end = int(self.lengths_q[document]) if end is None else end
        first = int(self._begin_q[document])
        shard = int(torch.searchsorted(self._shard_begin, first, right=True)) - 1
        offset = first - int(self._shard_begin[shard])
        part = self._maps[shard][(offset + begin) * self._width : (offset + end) * self._width]
        return _numbers(part, self._width)

    def piece(self, span: Span) -> tuple[Tensor, Tensor]:
        """Return `(ids_s, targets_s)` of a span.

        The first token is predicted from the start mark, and after the last one the end mark is
        predicted: a document of n tokens is n + 1 predictions.
        """
        length = int(self.lengths_q[span.document])
        known = self.tokens(span.document, max(span.begin - 1, 0), min(span.end, length))
        start = known.new_tensor([self.start_id] if span.begin == 0 else [])
        end = known.new_tensor([self.end_id] if span.end > length else [])
        marked = torch.cat([start, known, end])
        return marked[:-1], marked[1:]

    def pieces(self, spans: Iterable[Span] | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `(ids_s, targets_s)` of each span; of each whole document if none is given."""
        if spans is None:
            lengths = self.lengths_q.tolist()
            spans = (Span(number, 0, length + 1) for number, length in enumerate(lengths))
        return map(self.piece, spans)

    def bytes_of(self, span: Span) -> float:
        """Return the bytes of text that a span predicts; a token counts as its document's mean."""
        length = int(self.lengths_q[span.document])
        predicted = min(span.end, length) - span.begin
        return int(self.bytes_q[span.document]) * predicted / length

    def close(self) -> None:
        """Let go of the files."""
        self._maps = []


class Fingerprint:
    """A digest of everything that decides a token store: texts, names, order, tokenizer.

    Args:
        tokenizer: what makes tokens of the texts.
        identity: what tells this tokenizer from another of the same size.
    """

    def __init__(self, tokenizer: Tokenizer, identity: str) -> None:
        """Begin with no document."""
        ids = [tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id]
        self._digest = hashlib.sha256(json.dumps([FORMAT, identity, ids]).encode())

    def through(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Pass documents on, and remember them."""
        for document in documents:
            # Lengths keep the end of one text from passing for the beginning of the next.
            self._digest.update(json.dumps([document.name, len(document.text)]).encode())
            self._digest.update(document.text)
            yield document

    def __str__(self) -> str:
        return self._digest.hexdigest()


def fingerprint_of(
    documents: Iterable[Document], tokenizer: Tokenizer, identity: str = ""
) -> str | None:
    """Return the fingerprint that a store of these documents will have; None if there is none."""
    fingerprint = Fingerprint(tokenizer, identity)
    count = sum(1 for _ in fingerprint.through(documents))
    return str(fingerprint) if count else None


def write_store(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    identity: str = "",
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the tokens of documents into a folder, which is created.

    Args:
        folder: where to write; what an earlier build left there is replaced.
        documents: names and texts, none empty.
        tokenizer: must have an id that ends a text.
        identity: what tells this tokenizer from another of the same size.
        shard_bytes: a token file is closed when it has at least this size.

    Raises:
        CheckpointError: the system refuses to write.
        ConfigError: there is no document, or the tokenizer cannot end one.
    """
    where = "write_store"
    if tokenizer.eos_id is None:
        raise ConfigError(
            f"{where}: the tokenizer must have a token that ends a text; {tokenizer!r} has none. "
            "Name one as eos_token in the tokenizer_config.json beside it."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Until the last line below there is no index, so nobody reads a half-written store.
        (folder / INDEX).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{where}: {str(folder)!r} must be a folder that can be written; {error}. "
            "Set data.cache_dir."
        ) from error
    width = _width_of(tokenizer)
    lengths: list[int] = []
    counts: list[int] = []
    shards: list[dict[str, Any]] = []
    # Taken from the texts that are written, and not from an earlier reading of the same files.
    fingerprint = Fingerprint(tokenizer, identity)
    stream = _encoded(fingerprint.through(documents), tokenizer, width, lengths, counts)
    for number in range(sys.maxsize):
        file = folder / f"tokens-{number:05d}.bin"
        written = _write_shard(where, file, stream, shard_bytes)
        if written["bytes"] == 0:
            file.unlink()
            break
        shards.append(written)
    if not lengths:
        raise ConfigError(f"{where}: there must be at least one document that is not empty.")
    table = _to_bytes([*lengths, *counts], 8)
    written = _write_shard(where, folder / TABLE, iter([table]), len(table))
    write_json(
        where,
        folder / INDEX,
        {
            "format": FORMAT,
            "fingerprint": str(fingerprint),
            "vocab_size": tokenizer.vocab_size,
            "start_id": tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id,
            "end_id": tokenizer.eos_id,
            "width": width,
            "documents": len(lengths),
            "table": written,
            "shards": shards,
        },
    )


def open_store(folder: Path, fingerprint: str | None = None) -> TokenStore:
    """Open a folder of tokens, after comparing every byte with its checksum.

    Args:
        folder: what `write_store` wrote.
        fingerprint: what the sources have now; none accepts any.

    Raises:
        CheckpointError: a file is missing or damaged, or the store was made from other sources.
    """
    where = "open_store"
    index = read_json(where, folder / INDEX)
    try:
        if index["format"] != FORMAT:
            raise CheckpointError(
                f"{where}: {str(folder)!r} must have format {FORMAT}; got {index['format']!r}. "
                "Delete the folder; it is built again."
            )
        if fingerprint is not None and index["fingerprint"] != fingerprint:
            raise CheckpointError(
                f"{where}: {str(folder)!r} was made from other sources or with another tokenizer. "
                "Delete the folder; it is built again."
            )
        for entry in [index["table"], *index["shards"]]:
            _verify(where, folder / entry["name"], entry)
        table = _map(folder / TABLE, index["table"]["bytes"])
        lengths_q, bytes_q = _numbers(table, 8).view(2, index["documents"])
        return TokenStore(folder, index, lengths_q, bytes_q)
    except (KeyError, TypeError, RuntimeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{where}: {str(folder / INDEX)!r} must describe the files beside it; it is damaged "
            f"({error!r}). Delete the folder; it is built again."
        ) from error


def _width_of(tokenizer: Tokenizer) -> int:
    # The end mark of bytes, 256, is not stored.
    ids = 256 if isinstance(tokenizer, ByteTokenizer) else tokenizer.vocab_size
    return 1 if ids <= 2**8 else 2 if ids <= 2**16 else 4


def _encoded(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    width: int,
    lengths: list[int],
    counts: list[int],
) -> Iterator[bytes]:
    """Yield each document's tokens as bytes, and note its sizes."""
    for document in documents:
        if isinstance(tokenizer, ByteTokenizer):
            content = document.text
        else:
            ids = tokenizer.encode(document.text.decode("utf-8"), add_special_tokens=False)
            content = _to_bytes(ids, width)
        if content:
            lengths.append(len(content) // width)
            counts.append(len(document.text))
            yield content


def _write_shard(where: str, file: Path, stream: Iterator[bytes], limit: int) -> dict[str, Any]:
    """Write pieces until the limit is reached or none is left; return the entry of the index."""
    digest, size = hashlib.sha256(), 0
    with replacing(where, file) as target:
        for content in stream:
            target.write(content)
            digest.update(content)
            size += len(content)
            if size >= limit:
                break
    return {"name": file.name, "bytes": size, "sha256": digest.hexdigest()}


def _verify(where: str, file: Path, entry: dict[str, Any]) -> None:
    try:
        with open(file, "rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
            size = stream.tell()
    except OSError as error:
        raise CheckpointError(
            f"{where}: {str(file)!r} must be readable; {error}. Delete the folder; "
            "it is built again."
        ) from error
    if size != entry["bytes"] or found != entry["sha256"]:
        raise CheckpointError(
            f"{where}: {str(file)!r} must hold the {entry['bytes']} bytes that were written; it is "
            f"damaged ({size} bytes, wrong checksum). Delete the folder; it is built again."
        )


def _map(file: Path, size: int) -> Tensor:
    return torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)


def _to_bytes(numbers: Iterable[int], width: int) -> bytes:
    content = array({1: "B", 2: "H", 4: "I", 8: "Q"}[width], numbers)
    if sys.byteorder == "big":
        content.byteswap()
    return content.tobytes()


def _numbers(content: Tensor, width: int) -> Tensor:
    """Return int64 numbers from little-endian bytes, whatever the machine's own order is."""
    shifts = torch.arange(0, 8 * width, 8)
    return (content.view(-1, width).to(torch.int64) << shifts).sum(1)
