"""From a recipe to open token stores: find, fingerprint, reuse or build."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from anymamba.errors import CheckpointError, ConfigError
from anymamba.io import Tokenizer, load_tokenizer
from anymamba.train.corpus import Corpus, Split
from anymamba.train.recipe_sections import DataRecipe
from anymamba.train.shards import TokenStore, fingerprint_of, open_store, write_store

__all__ = ["TrainingData", "prepare_data"]

# Shown to a tokenizer that is known by a name on the hub only; its answer becomes its identity.
PROBE = "The quick brown fox; naïve café, 12345.6789\n\tdef f(x): return x**2  # 漢字 🙂"
SHOWN = 3
# The name of the tokenizer without a file, even where a file of that name lies about.
BYTES = "bytes"


@dataclass(frozen=True)
class TrainingData:
    """The tokens of a recipe.

    Args:
        train: to train with.
        valid: held out; none if the recipe asks for none.
        tokenizer: what made them.
        notes: sentences for the person at the terminal: what was built, reused, skipped, repaired.
    """

    train: TokenStore
    valid: TokenStore | None
    tokenizer: Tokenizer
    notes: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        """Number of token ids, marks included."""
        return self.train.vocab_size

    @property
    def fingerprints(self) -> dict[str, str]:
        """What identifies the tokens of both sides, for a checkpoint to remember."""
        valid = {} if self.valid is None else {"valid": self.valid.fingerprint}
        return {"train": self.train.fingerprint, **valid}

    def close(self) -> None:
        """Let go of the token files."""
        self.train.close()
        if self.valid is not None:
            self.valid.close()


def prepare_data(
    recipe: DataRecipe, cache_dir: str | Path, run_folder: str | Path | None = None
) -> TrainingData:
    """Open the tokens that a recipe asks for; make them if the cache has none from these sources.

    Sources are known by their content: a file that was only touched changes nothing, a changed
    letter makes new tokens. A damaged cache is built again, and a note says so.

    Args:
        recipe: which text, which tokenizer.
        cache_dir: where token files are kept, one folder per content.
        run_folder: where the run keeps its files; like `cache_dir` it is never part of the text.

    Raises:
        ConfigError: the corpus is missing, unreadable or too small to hold out text from.
        CheckpointError: the tokenizer cannot be loaded, or the cache cannot be written.
    """
    tokenizer = load_tokenizer(recipe.tokenizer)
    identity = _identity_of(recipe.tokenizer, tokenizer)
    own_folders = [cache_dir, *([] if run_folder is None else [run_folder])]
    corpus, notes = Corpus(recipe, without=own_folders), []
    train = _store(corpus, "train", tokenizer, identity, Path(cache_dir), notes)
    if train is None:
        raise ConfigError(
            "prepare_data: data.train must leave text to train with; every document is empty, "
            "skipped or held out. Check the paths, and data.valid_share."
        )
    valid = None
    if corpus.holds_out:
        valid = _store(corpus, "valid", tokenizer, identity, Path(cache_dir), notes)
        if valid is None:
            raise ConfigError(_nothing_held_out(recipe, corpus))
    if corpus.skipped:
        shown = [f"{name} ({why})" for name, why in list(corpus.skipped.items())[:SHOWN]]
        more = ", ..." if len(corpus.skipped) > SHOWN else ""
        notes.append(f"left out {len(corpus.skipped)} files: {', '.join(shown)}{more}")
    return TrainingData(train, valid, tokenizer, tuple(notes))


def _store(
    corpus: Corpus,
    split: Split,
    tokenizer: Tokenizer,
    identity: str,
    cache_dir: Path,
    notes: list[str],
) -> TokenStore | None:
    """Open or build the store of one side; None if that side has no document."""
    fingerprint = fingerprint_of(corpus.documents(split), tokenizer, identity)
    if fingerprint is None:
        return None
    folder = cache_dir / f"{split}-{fingerprint[:16]}"
    if folder.is_dir():
        try:
            store = open_store(folder, fingerprint)
            notes.append(f"{split}: reusing {store!r} in {folder}")
            return store
        except CheckpointError as error:
            notes.append(f"{split}: the cache is built again, because {error}")
    write_store(folder, corpus.documents(split), tokenizer, identity)
    store = open_store(folder, fingerprint)
    notes.append(f"{split}: wrote {store!r} to {folder}")
    return store


def _nothing_held_out(recipe: DataRecipe, corpus: Corpus) -> str:
    if recipe.valid:
        return (
            f"prepare_data: data.valid must hold text; every document of {list(recipe.valid)} is "
            "empty or was skipped."
        )
    return (
        f"prepare_data: with so few documents none falls into data.valid_share="
        f"{recipe.valid_share}. Set data.valid_share={corpus.smallest_share()} to hold one out, "
        "name held-out files in data.valid, or set data.valid_share=0 to train without."
    )


def tokenizer_file(name: str) -> Path | None:
    """Return the file on this machine that a tokenizer is read from; None for bytes and the hub."""
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    return file if name != BYTES and file.is_file() else None


def _identity_of(name: str, tokenizer: Tokenizer) -> str:
    """Return what tells a tokenizer from others: its file's content, or its name and behaviour."""
    if (file := tokenizer_file(name)) is not None:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    return f"{name} {tokenizer.encode(PROBE, add_special_tokens=False)}"
