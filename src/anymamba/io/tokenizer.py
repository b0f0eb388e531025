"""Text to token ids and back: from a `tokenizer.json`, or byte by byte without any file.

A tokenizer here is whatever has the members of `Tokenizer`. Models never see text.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from anymamba.errors import CheckpointError, ConfigError
from anymamba.io.disk import read_json, utf8

__all__ = ["ByteTokenizer", "FileTokenizer", "IncrementalDecoder", "Tokenizer", "load_tokenizer"]

# What decoders write where bytes are not, or not yet, a character.
REPLACEMENT = "\ufffd"
# How the vocabularies of published models call the end and the beginning of a text.
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>")


@runtime_checkable
class Tokenizer(Protocol):
    """What turns text into token ids and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included; some ids may have no token."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text, if there is one."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, if there is one."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; special tokens are those the model expects around it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens; broken characters become U+FFFD."""
        ...


class ByteTokenizer:
    """Every byte of UTF-8 is a token; id 256 ends a text. Needs no file and no package.

    Example:
        >>> ByteTokenizer().encode("hé")
        [104, 195, 169]
        >>> ByteTokenizer().decode([104, 195, 169, 256])
        'hé'
    """

    vocab_size = 257
    eos_id = 256
    bos_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the bytes of a text; nothing is put around it.

        Raises:
            ConfigError: the text is not UTF-8.
        """
        return list(utf8("ByteTokenizer.encode", text))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes, without the end mark.

        Raises:
            ConfigError: an id outside 0..256.
        """
        for token in ids:
            if not 0 <= token <= self.eos_id:
                raise ConfigError(
                    f"ByteTokenizer.decode: ids must lie in 0..256; got {token}. "
                    "The model may need another tokenizer."
                )
        text = bytes(token for token in ids if token != self.eos_id)
        return text.decode("utf-8", errors="replace")

    def __repr__(self) -> str:
        return "ByteTokenizer()"


class FileTokenizer:
    """A tokenizer of the `tokenizers` library; made by `load_tokenizer`."""

    def __init__(self, inner: Any, eos_id: int | None, bos_id: int | None) -> None:
        """Take the library's object, and the ids that end and begin a text."""
        self._inner = inner
        self._eos_id, self._bos_id = eos_id, bos_id
        # Not the number of tokens: files may leave ids out, and a model has a row for each.
        ids = inner.get_vocab(with_added_tokens=True).values()
        self._vocab_size = max(ids, default=-1) + 1

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included."""
        return self._vocab_size

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text, if there is one."""
        return self._eos_id

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, if there is one."""
        return self._bos_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with the special tokens that the file puts around it.

        The name of a special token inside the text becomes that token.

        Raises:
            ConfigError: the text is not UTF-8.
        """
        utf8("FileTokenizer.encode", text)
        return self._inner.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def __repr__(self) -> str:
        return f"FileTokenizer(vocab_size={self.vocab_size}, eos_id={self.eos_id})"


def load_tokenizer(
    name_or_file: str | os.PathLike[str], *, revision: str | None = None
) -> Tokenizer:
    """Read a tokenizer from a `tokenizer.json`, a directory with one, or the hub.

    The end and the beginning of a text are taken from the `tokenizer_config.json` beside it, else
    from the usual names. Truncation and padding that the file asks for are switched off: a prompt
    is never cut silently.

    Args:
        name_or_file: a file, a directory, or a name on the hub such as "EleutherAI/gpt-neox-20b";
            "bytes" is the `ByteTokenizer`.
        revision: of the hub's repository.

    Raises:
        CheckpointError: the file is missing or damaged, or a package is not installed.
    """
    if name_or_file == "bytes":
        return ByteTokenizer()
    file, config = _find(name_or_file, revision)
    try:
        from tokenizers import Tokenizer as Inner
    except ImportError as error:
        raise CheckpointError(
            "load_tokenizer: the package tokenizers must be installed; it cannot be imported. "
            "Run: pip install tokenizers"
        ) from error
    try:
        inner = Inner.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(
            f"load_tokenizer: {str(file)!r} must be a whole tokenizer.json; {error}. "
            "Fetch the file again."
        ) from error
    inner.no_truncation()
    inner.no_padding()
    names = _special_names(config)
    return FileTokenizer(
        inner,
        _id_of(inner, names.get("eos_token"), EOS_NAMES),
        _id_of(inner, names.get("bos_token"), BOS_NAMES),
    )


def _find(name_or_file: str | os.PathLike[str], revision: str | None) -> tuple[Path, Path | None]:
    """Return the tokenizer's file, and the config beside it if there is one."""
    path = Path(name_or_file)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        config = file.parent / "tokenizer_config.json"
        return file, config if config.is_file() else None
    # A name on the hub is `name` or `owner/name`; anything else can only be meant as a path.
    if path.is_dir() or path.suffix == ".json" or path.is_absolute() or len(path.parts) > 2:
        raise CheckpointError(
            f"load_tokenizer: {str(file)!r} must be a file; there is none. Give a tokenizer.json, "
            "a directory that holds one, or the name of a repository on the hub."
        )
    return _fetch(os.fspath(name_or_file), revision)


def _fetch(name: str, revision: str | None) -> tuple[Path, Path | None]:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError as error:
        raise CheckpointError(
            f"load_tokenizer: {name!r} is no file here, and the package huggingface_hub, which "
            "would look for it on the hub, cannot be imported. Run: pip install huggingface_hub"
        ) from error
    try:
        file = Path(hf_hub_download(name, "tokenizer.json", revision=revision))
    except Exception as error:  # network, rights, revision, offline: the errors share no base
        raise CheckpointError(
            f"load_tokenizer: {name!r} must be a file, a directory, or a repository on the hub "
            f"with a tokenizer.json; {error}. Check the name and the connection."
        ) from error
    try:
        return file, Path(hf_hub_download(name, "tokenizer_config.json", revision=revision))
    except EntryNotFoundError:
        return file, None


def _special_names(config: Path | None) -> dict[str, str]:
    """Return the names of special tokens that a config gives, as plain strings."""
    if config is None:
        return {}
    names: dict[str, str] = {}
    for key, value in read_json("load_tokenizer", config).items():
        # Older files write {"content": "</s>", "lstrip": false, ...}.
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            names[key] = text
    return names


def _id_of(inner: Any, name: str | None, usual: Iterable[str]) -> int | None:
    for candidate in usual if name is None else (name,):
        if (token := inner.token_to_id(candidate)) is not None:
            return token
    return None


class IncrementalDecoder:
    """Turns a stream of ids into a stream of text that never holds half a character.

    `"".join(decoder.push(id) for id in ids) + decoder.flush()` is `tokenizer.decode(ids)`, for
    every tokenizer whose earlier text does not change when ids are appended, a broken end apart.

    Example:
        >>> decoder = IncrementalDecoder(ByteTokenizer())
        >>> [decoder.push(byte) for byte in "né!".encode()], decoder.flush()
        (['n', '', 'é', '!'], '')
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start with no text."""
        self._tokenizer = tokenizer
        # Ids whose text is complete; they stay one round as context, because some decoders treat
        # the first token differently (a leading space).
        self._context: list[int] = []
        self._waiting: list[int] = []
        # How many characters of the text of both were handed out.
        self._given = 0

    def push(self, token: int) -> str:
        """Take an id; return the text that is now certain, possibly none."""
        self._waiting.append(token)
        text = self._text()
        # A broken end may still become a character.
        certain = text.rstrip(REPLACEMENT)
        new = certain[self._given :]
        self._given = max(self._given, len(certain))
        # A token without text (a special one) cannot serve as context.
        if new and len(certain) == len(text):
            self._context, self._waiting = self._waiting, []
            self._given = len(self._text())
        return new

    def flush(self) -> str:
        """Return what was held back, and start anew."""
        new = self._text()[self._given :]
        self._context, self._waiting, self._given = [], [], 0
        return new

    def _text(self) -> str:
        return self._tokenizer.decode(self._context + self._waiting)
