"""Where a checkpoint lies: a folder, or a repository of the hub.

The hub is `huggingface_hub`'s business: cache (`HF_HOME`), offline flags, tokens and revisions such
as `refs/pr/1` work as everywhere. Only the files that are read are downloaded.
"""

import os
import re
from pathlib import Path
from typing import Any

from anymamba.errors import CheckpointError, ConfigError
from anymamba.io.weights_file import WEIGHT_FILES, shards_of

__all__ = ["TEXT_FILES", "locate"]

# `name` or `owner/name`; anything else can only be meant as a path.
_REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# What belongs to a model's text, beside config and weights.
TEXT_FILES = (
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def locate(
    where: str,
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    optional: tuple[str, ...] = (),
) -> Path:
    """Return the folder of a checkpoint; download what is missing if it is a name of the hub.

    An existing folder is never looked up on the hub.

    Args:
        where: the function that asks; opens every message.
        name: a folder, or a name such as `state-spaces/mamba-130m`.
        revision: branch, tag, commit or reference on the hub.
        cache_dir: where the hub's cache lies, if not in its usual place.
        local_files_only: never use the network.
        optional: files to bring along if they are there.

    Raises:
        CheckpointError: there is no such folder or repository, or it cannot be reached.
        ConfigError: a revision was given for a folder.
    """
    directory = Path(name)
    if directory.is_dir():
        if revision is not None:
            raise ConfigError(
                f"{where}: revision belongs to the hub; {str(name)!r} is a folder. Leave it out."
            )
        return directory
    if directory.exists():
        raise CheckpointError(
            f"{where}: a checkpoint must be a folder; {str(name)!r} is a file. "
            f"Pass {str(directory.parent)!r}."
        )
    if not isinstance(name, str) or not _REPOSITORY.fullmatch(name):
        raise CheckpointError(
            f"{where}: {str(name)!r} must be an existing folder, or a hub name such as "
            "'state-spaces/mamba-130m'; it is neither. Check the path."
        )
    how = {"revision": revision, "cache_dir": cache_dir, "local_files_only": local_files_only}
    return _download(where, name, how, ("anymamba.json", *optional))


def _download(where: str, name: str, how: dict[str, Any], optional: tuple[str, ...]) -> Path:
    config = _fetch(where, name, "config.json", how)
    if config is None:
        raise CheckpointError(
            f"{where}: {_spell(name, how)} must have a config.json that can be reached; there is "
            "none, and no folder of that name here. Check the name, the network and HF_HUB_OFFLINE."
        )
    for candidate in WEIGHT_FILES:
        weights = _fetch(where, name, candidate, how)
        if weights is not None:
            break
    else:
        raise CheckpointError(
            f"{where}: {_spell(name, how)} must have weights that can be reached; there is none of "
            f"{', '.join(WEIGHT_FILES)}. Check the revision, the network and HF_HUB_OFFLINE."
        )
    files = [weights]
    if weights.suffix == ".json":
        for shard in shards_of(where, weights):
            if (file := _fetch(where, name, shard, how)) is None:
                raise CheckpointError(
                    f"{where}: {_spell(name, how)} must have every shard of its index; "
                    f"{shard!r} cannot be reached. Check the network and HF_HUB_OFFLINE."
                )
            files.append(file)
    for extra in optional:
        _fetch(where, name, extra, how)
    if any(file.parent != config.parent for file in files):
        raise CheckpointError(
            f"{where}: the files of {_spell(name, how)} must come from one commit; it changed "
            "while they were downloaded. Try again."
        )
    return config.parent


def _fetch(where: str, name: str, file: str, how: dict[str, Any]) -> Path | None:
    """Return the file in the hub's cache, or None if the repository does not have it."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError as error:
        raise CheckpointError(
            f"{where}: {name!r} is no folder here, and huggingface_hub must be installed to look "
            "for it on the hub; it cannot be imported. Run: pip install 'anymamba[io]'"
        ) from error
    try:
        return Path(hf_hub_download(name, file, **how))
    except EntryNotFoundError:
        return None
    # Network, access rights, a wrong revision, a damaged cache: the hub has an error for each, and
    # they share no base.
    except Exception as error:
        raise CheckpointError(
            f"{where}: {_spell(name, how)} must be a hub repository that can be reached; {error}"
        ) from error


def _spell(name: str, how: dict[str, Any]) -> str:
    return repr(name) if how["revision"] is None else f"{name!r} at {how['revision']!r}"
