"""Small files and the atomic exchange of any file; knows nothing of models."""

import json
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from anymamba.errors import CheckpointError, ConfigError

__all__ = ["read_json", "read_text", "replacing", "replacing_path", "utf8", "write_json"]


def utf8(where: str, text: str) -> bytes:
    """Return the bytes of a text.

    Args:
        where: the function that asks; opens every message.
        text: from anywhere; Python keeps bytes of the terminal that are not UTF-8 as half
            surrogate pairs.

    Raises:
        ConfigError: the text has no form in UTF-8.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: text must be UTF-8; character {error.start} is {text[error.start]!r}, no "
            "part of it. Convert the text."
        ) from error


def read_text(where: str, file: Path) -> str:
    """Return the text of a file.

    Args:
        where: the function that asks; opens every message.
        file: in UTF-8.

    Raises:
        ConfigError: the file is not UTF-8.
        OSError: the system refuses.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: {str(file)!r} must be text in UTF-8; byte {error.start} is not. "
            "Convert the file."
        ) from error


@contextmanager
def replacing(where: str, file: Path) -> Iterator[BinaryIO]:
    """Yield a stream whose content becomes `file` when the block ends without an error.

    A crash leaves an older file as it was, at worst with a hidden `.part` file beside it. A link is
    replaced, not followed: behind the links of the hub's cache lie files that others share.

    Args:
        where: the function that asks; opens every message.
        file: where to write; the folder must exist.

    Raises:
        CheckpointError: the system refuses.
    """
    with replacing_path(where, file) as temporary, open(temporary, "wb") as stream:
        yield stream


@contextmanager
def replacing_path(where: str, file: Path) -> Iterator[Path]:
    """Yield the path of an empty file that becomes `file` when the block ends without an error.

    For libraries that write to a path; like `replacing` otherwise. They may put a file of their own
    there: its permissions become those of the old file, or of a new one. A crash may leave hidden
    files of theirs, too.

    Args:
        where: the function that asks; opens every message.
        file: where to write; the folder must exist.

    Raises:
        CheckpointError: the system refuses.
    """
    temporary = file.parent / f".{file.name}.{secrets.token_hex(4)}.part"
    handled_outside = sys.exc_info()[1]
    try:
        with open(temporary, "xb"):
            mode = stat.S_IMODE((file if file.exists() else temporary).stat().st_mode)
        # Private from the first byte if the old file is; writable until the last if it is not.
        temporary.chmod(mode | stat.S_IRUSR | stat.S_IWUSR)
        yield temporary
        with open(temporary, "rb+") as stream:
            # Without this a power cut could keep the new name and lose the bytes behind it.
            os.fsync(stream.fileno())
        temporary.chmod(mode)
        os.replace(temporary, file)
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        # torch's writer, closing after a failure, covers it with a RuntimeError of its own. Whoever
        # saves while handling an error has that one as the context of the first failure.
        covered = error.__context__
        first = error if covered is None or covered is handled_outside else covered
        if not isinstance(first, Exception):
            raise first from None
        raise CheckpointError(
            f"{where}: {str(file)!r} must be writable; {first}. "
            "The old file is untouched: choose another place, or make room."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(where: str, file: Path, entries: dict[str, Any]) -> None:
    """Write a JSON object, whole or not at all."""
    with replacing(where, file) as stream:
        stream.write((json.dumps(entries, indent=4) + "\n").encode())


def read_json(where: str, file: Path) -> dict[str, Any]:
    """Return the content of a file that holds one JSON object.

    Raises:
        CheckpointError: the file is missing, unreadable, or holds anything else.
    """
    try:
        entries = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{where}: {str(file)!r} must be a readable file; {error}. Check the path."
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: {str(file)!r} must hold JSON; it is damaged ({error}). Use a copy."
        ) from error
    if not isinstance(entries, dict):
        raise CheckpointError(
            f"{where}: {str(file)!r} must hold a JSON object; got {type(entries).__name__}."
        )
    return entries
