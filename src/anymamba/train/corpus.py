"""Where text comes from: files, folders, JSON lines, a data set, or Python's own sources.

A document is a name and the bytes of a text in UTF-8. Names decide which documents are held out, by
a digest, so a new file never moves an old one from one side to the other.
"""

import hashlib
import json
import math
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from anymamba.errors import ConfigError
from anymamba.train.recipe_sections import DataRecipe

__all__ = ["Corpus", "Document", "Split", "place_of"]

Split = Literal["train", "valid"]
Wanted = Callable[[str], bool]
WHERE = "corpus"
# Of the standard library: what is installed beside it, and its tests, which few machines have.
NOT_STANDARD = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})

# Files that together only a run, or a store of tokens, has.
OURS = (("recipe.toml", "metrics.jsonl"), ("index.json", "documents.bin"))
# How much more of a single text may be held out than a small share asks for: lines have lengths.
SLACK = 0.1


class Document(NamedTuple):
    """A text: its name relative to where it was found, and its bytes."""

    name: str
    text: bytes


class SourceFile(NamedTuple):
    """A file that may hold documents; `chosen` if it was named itself, not found in a folder."""

    name: str
    file: Path
    chosen: bool


def place_of(name: str) -> float:
    """Return a number in [0, 1) that depends on nothing but a name; even over many names.

    Example:
        >>> place_of("a.txt") == place_of("a.txt") != place_of("b.txt")
        True
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


class Corpus:
    """The documents of a recipe, on two sides: to train with, and held out.

    A file or JSON line is held out when the place of its name lies below `valid_share`. A corpus
    with a single text has no second one to hold out; its last lines are.

    Args:
        recipe: paths, kind, and how much to hold out.
        without: folders in which a run keeps its own files. They are left out of the text, and
            so are all other folders that hold a run or tokens.

    Raises:
        ConfigError: a path does not exist or holds no file, or is such a folder itself; one file
            is on both sides, or the `datasets` library is needed and absent.
    """

    def __init__(self, recipe: DataRecipe, without: Iterable[str | Path] = ()) -> None:
        """Find the files; nothing is read yet."""
        self._recipe = recipe
        self._without = frozenset(Path(folder).resolve() for folder in without)
        self.skipped: dict[str, str] = {}
        self._rows = None if recipe.dataset is None else _load_dataset(recipe.dataset)
        self._train = self._training_files()
        self._valid = _find(recipe.valid, recipe.kind, self._without)
        held = {source.file.resolve() for source in self._valid}
        if both := [source for source in self._train if source.file.resolve() in held]:
            raise ConfigError(
                f"{WHERE}: a file must be in data.train or in data.valid; {str(both[0].file)!r} is "
                "in both. Take it out of one of them."
            )

    @property
    def holds_out(self) -> bool:
        """Whether the recipe asks for held-out text."""
        return bool(self._valid) or self._recipe.valid_share > 0

    def documents(self, split: Split) -> Iterator[Document]:
        """Yield the documents of one side, always in the same order; empty ones are left out.

        Raises:
            ConfigError: a file cannot be read, or does not hold what the recipe says.
        """
        if split == "valid" and self._valid:
            chosen = self._read(self._valid, lambda name: True)
        elif self._share > 0 and self._is_single_text():
            parts = (
                _cut(document, self._share) for document in self._everything() if document.text
            )
            chosen = (tail if split == "valid" else head for head, tail in parts)
        else:
            chosen = self._everything(
                lambda name: (place_of(name) < self._share) == (split == "valid")
            )
        yield from (document for document in chosen if document.text)

    def smallest_share(self) -> float:
        """Return the least `valid_share` that holds out a document, rounded up."""
        places = [place_of(d.name) for d in self._everything() if d.text]
        return math.floor(min(places, default=1.0) * 1000 + 1) / 1000

    def _training_files(self) -> list[SourceFile]:
        if self._rows is not None:
            return []
        found = _find(self._recipe.train, self._recipe.kind, self._without)
        return found or _standard_library()

    def _is_single_text(self) -> bool:
        """Whether one text can be used, whatever else lies beside it."""
        if self._rows is not None or self._recipe.kind != "text":
            return False
        texts = (document for document in self._everything() if document.text)
        return len(list(islice(texts, 2))) == 1

    @property
    def _share(self) -> float:
        return 0.0 if self._valid else self._recipe.valid_share

    def _everything(self, wanted: Wanted = lambda name: True) -> Iterator[Document]:
        if self._rows is not None:
            return _dataset_documents(self._rows, self._recipe, wanted)
        return self._read(self._train, wanted)

    def _read(self, sources: list[SourceFile], wanted: Wanted) -> Iterator[Document]:
        by_line = self._recipe.kind == "jsonl"
        for source in sources:
            if not by_line and not wanted(source.name):
                continue
            try:
                content = source.file.read_bytes()
            except OSError as error:
                raise ConfigError(
                    f"{WHERE}: {str(source.file)!r} must be readable; {error}. "
                    "Correct its rights, or take it out of the corpus."
                ) from error
            if reason := _not_text(content):
                if source.chosen or by_line:
                    raise ConfigError(
                        f"{WHERE}: {str(source.file)!r} must be text in UTF-8; {reason}. "
                        "Convert it, or leave it out."
                    )
                self.skipped[source.name] = reason
            elif by_line:
                lines = _lines(source, content, self._recipe.text_key)
                yield from (document for document in lines if wanted(document.name))
            else:
                yield Document(source.name, content)


def _find(paths: tuple[str, ...], kind: str, without: frozenset[Path]) -> list[SourceFile]:
    """List the files behind paths: in the order given, inside folders by name, each once."""
    found: dict[Path, SourceFile] = {}
    for path in map(Path, paths):
        if path.is_file():
            sources = [SourceFile(path.name, path, True)]
        elif path.resolve() in without:
            raise ConfigError(
                f"{WHERE}: {str(path)!r} must hold text; the run would keep its own files in the "
                "same folder. Set loop.out or data.cache_dir to another place."
            )
        elif path.is_dir():
            pattern = ".jsonl" if kind == "jsonl" else ""
            sources = [
                SourceFile(name, path / name, False)
                for name in _names_below(path, lambda place: not _is_ours(place, without))
                if name.endswith(pattern)
            ]
        else:
            raise ConfigError(
                f"{WHERE}: {str(path)!r} must be a file or a folder; there is none. "
                "Check data.train and data.valid."
            )
        if not sources:
            what = "files that end in .jsonl" if kind == "jsonl" else "files"
            raise ConfigError(f"{WHERE}: {str(path)!r} must hold {what}; there are none.")
        for source in sources:
            found.setdefault(source.file.resolve(), source)
    return list(found.values())


def _is_ours(folder: Path, without: frozenset[Path]) -> bool:
    """Whether a folder holds what a run has written, and no text of a person."""
    return folder.resolve() in without or any(
        all((folder / name).is_file() for name in names) for names in OURS
    )


def _names_below(folder: Path, enter: Callable[[Path], bool]) -> list[str]:
    """List the files below a folder by name; hidden ones and linked folders are left out.

    Args:
        folder: where to begin.
        enter: whether to look into a folder below it.
    """
    names: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and enter(Path(place) / name)]
        below = Path(place).relative_to(folder)
        names += [
            (below / name).as_posix()
            for name in files
            if not name.startswith(".") and (Path(place) / name).is_file()
        ]
    return sorted(names)


def _standard_library() -> list[SourceFile]:
    """List the sources of Python's standard library, which every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [
        SourceFile(name, root / name, False)
        for name in _names_below(root, lambda place: place.name not in NOT_STANDARD)
        if name.endswith(".py")
    ]
    if not found:
        raise ConfigError(
            f"{WHERE}: the default corpus is Python's standard library; this Python keeps no "
            f"sources in {str(root)!r}. Set data.train."
        )
    return found


def _not_text(content: bytes) -> str | None:
    """Say why bytes are no text, or None."""
    if b"\0" in content:
        return "it holds zero bytes"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    return None


def _lines(source: SourceFile, content: bytes, key: str) -> Iterator[Document]:
    """Yield the documents of a file of JSON lines."""
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{WHERE}: {str(source.file)!r}, line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} must be JSON; {error}. Correct the line.") from error
        yield Document(f"{source.name}:{number}", _text_of(where, entry, key))


def _text_of(where: str, entry: Any, key: str) -> bytes:
    text = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        given = f"keys {sorted(entry)}" if isinstance(entry, dict) else type(entry).__name__
        raise ConfigError(
            f"{where} must hold a string under {key!r}; got {given}. Set data.text_key."
        )
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise ConfigError(f"{where} must hold a whole text; {error}. Correct it.") from error


def _cut(document: Document, share: float) -> tuple[Document, Document]:
    """Cut a document in two behind a line's end, the second part about `share` of it."""
    text, where = document.text, f"{WHERE}: to hold out the end of {document.name!r}, the only text"
    advice = "Break its lines, give data.valid, or set data.valid_share=0."
    middle = int(len(text) * (1 - share))
    ends = (text.rfind(b"\n", 0, middle) + 1, text.find(b"\n", middle) + 1)
    inside = [end for end in ends if 0 < end < len(text)]
    if not inside:
        raise ConfigError(f"{where}, it must have several lines; it has not. {advice}")
    end = min(inside, key=lambda end: abs(end - middle))
    held = 1 - end / len(text)
    if held < share / 4 or held > share + max(share, SLACK):
        raise ConfigError(
            f"{where}, a line must end near the last {share:.1%} of it; the nearest one holds "
            f"out {held:.1%}. {advice}"
        )
    head, tail = text[:end], text[end:]
    return Document(f"{document.name}:head", head), Document(f"{document.name}:tail", tail)


def _load_dataset(name: str) -> Any:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"{WHERE}: data.dataset={name!r} needs the package datasets; it cannot be imported. "
            "Run: pip install datasets"
        ) from error
    base, _, subset = name.partition(":")
    try:
        return load_dataset(base, subset or None, split="train")
    except Exception as error:  # network, names, rights: the library's errors share no base
        raise ConfigError(
            f"{WHERE}: data.dataset={name!r} must be a data set with a split 'train'; {error}. "
            "Check the name and the connection."
        ) from error


def _dataset_documents(rows: Any, recipe: DataRecipe, wanted: Wanted) -> Iterator[Document]:
    for number, entry in enumerate(rows):
        if wanted(name := f"{recipe.dataset}:{number}"):
            where = f"{WHERE}: data set {recipe.dataset!r}, row {number}"
            yield Document(name, _text_of(where, entry, recipe.text_key))
