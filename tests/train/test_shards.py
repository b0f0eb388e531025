"""Laws of token files: what is written is read, caches are reused, damage is never read."""

import json
import os
from pathlib import Path

import pytest
import torch
from numbers_as_tokens import END, START, NumberTokenizer, number_store, token
from run_recipes import plant_tokenizer

from anymamba.errors import CheckpointError, ConfigError
from anymamba.io import ByteTokenizer
from anymamba.train import (
    DataRecipe,
    Document,
    Span,
    TokenStore,
    fingerprint_of,
    open_store,
    prepare_data,
    write_store,
)

TEXTS = ["erste Zeile\nzweite", "ü", "a" * 300]
DOCUMENTS = [Document(str(number), text.encode()) for number, text in enumerate(TEXTS)]


def byte_store(folder: Path, **options) -> TokenStore:
    write_store(folder, DOCUMENTS, ByteTokenizer(), **options)
    return open_store(folder)


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.rglob(pattern)
    return found


def notes_of(recipe: DataRecipe, cache: Path) -> str:
    data = prepare_data(recipe, cache)
    data.close()
    return "\n".join(data.notes)


@pytest.fixture
def recipe(tmp_path):
    """Return a recipe for twenty small files, some held out."""
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"text of {number}\n" * 5)
    return DataRecipe(train=(str(tmp_path / "text"),), valid_share=0.3)


@pytest.mark.parametrize("shard_bytes", [1, 20, 2**20])
def test_bytes_are_read_back_whatever_the_size_of_shards(shard_bytes, tmp_path):
    """Every document comes back whole, with the number of its bytes, from one shard or many."""
    store = byte_store(tmp_path, shard_bytes=shard_bytes)
    assert [bytes(store.tokens(n).tolist()).decode() for n in range(3)] == TEXTS
    assert store.bytes_q.tolist() == [len(text.encode()) for text in TEXTS]
    assert (store.vocab_size, store.start_id, store.end_id) == (257, 256, 256)
    shards = len(list(tmp_path.glob("tokens-*.bin")))
    assert shards == {1: 3, 20: 2, 2**20: 1}[shard_bytes]
    assert sum(file.stat().st_size for file in tmp_path.glob("tokens-*.bin")) == 320


@pytest.mark.parametrize(
    ("vocab_size", "width"), [(256, 1), (257, 2), (2**16, 2), (2**16 + 1, 4), (2**32, 4)]
)
def test_tokens_take_the_bytes_that_the_vocabulary_needs(vocab_size, width, tmp_path):
    """The largest id survives in 1, 2 or 4 bytes, little endian on every machine."""
    tokenizer = NumberTokenizer()
    tokenizer.vocab_size = vocab_size
    ids = [0, 1, vocab_size // 2, vocab_size - 1]
    write_store(tmp_path, [Document("a", " ".join(map(str, ids)).encode())], tokenizer)
    assert open_store(tmp_path).tokens(0).tolist() == ids
    content = (tmp_path / "tokens-00000.bin").read_bytes()
    assert content == b"".join(number.to_bytes(width, "little") for number in ids)


def test_a_piece_predicts_every_token_and_the_end(tmp_path):
    """A document of n tokens is n + 1 predictions: from the start mark to the end mark."""
    store = number_store(tmp_path, [3, 2])
    a, b, c = (token(0, place) for place in range(3))
    expected = {
        (0, 4): ([START, a, b, c], [a, b, c, END]),
        (0, 2): ([START, a], [a, b]),
        (1, 3): ([a, b], [b, c]),
        (3, 4): ([c], [END]),
    }
    for (begin, end), (ids, targets) in expected.items():
        got = [part.tolist() for part in store.piece(Span(0, begin, end))]
        assert [ids, targets] == got
    wholes = [ids_s.tolist() for ids_s, _ in store.pieces()]
    assert wholes == [[START, a, b, c], [START, token(1, 0), token(1, 1)]]


def test_bytes_of_parts_sum_to_those_of_the_document(tmp_path):
    """Cutting a document anywhere shares out exactly its bytes; the end mark has none."""
    store = byte_store(tmp_path)
    assert store.bytes_of(Span(0, 0, 19)) == 18
    assert store.bytes_of(Span(0, 0, 7)) + store.bytes_of(Span(0, 7, 19)) == 18
    assert store.bytes_of(Span(0, 18, 19)) == 0


def test_fingerprints_tell_texts_names_borders_and_tokenizers_apart(tmp_path):
    """Whatever would give other tokens, or other sides, gives another fingerprint."""
    a, b = Document("a", b"xy"), Document("b", b"z")
    cases = [
        ([a, b], ByteTokenizer(), ""),
        ([b, a], ByteTokenizer(), ""),
        ([a], ByteTokenizer(), ""),
        ([Document("a", b"x"), Document("b", b"yz")], ByteTokenizer(), ""),
        ([Document("c", b"xy"), b], ByteTokenizer(), ""),
        ([Document("a", b'xy["b"]z')], ByteTokenizer(), ""),
        ([Document("a", b'xy["b", 1]z')], ByteTokenizer(), ""),
        ([a, b], ByteTokenizer(), "other"),
        ([a, b], NumberTokenizer(), ""),
    ]
    found = {fingerprint_of(*case) for case in cases}
    assert len(found) == len(cases)
    assert fingerprint_of([], ByteTokenizer()) is None
    write_store(tmp_path, [a, b], ByteTokenizer())
    assert open_store(tmp_path).fingerprint == fingerprint_of([a, b], ByteTokenizer())


@pytest.mark.parametrize("name", ["tokens-00000.bin", "tokens-00001.bin", "documents.bin"])
@pytest.mark.parametrize("damage", ["flip", "shorten", "lengthen", "remove"])
def test_damage_is_refused(name, damage, tmp_path):
    """One changed bit, a missing end, a longer end and a missing file are all noticed."""
    byte_store(tmp_path, shard_bytes=20)
    file = tmp_path / name
    content = file.read_bytes()
    if damage == "flip":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "shorten":
        file.write_bytes(content[:-1])
    elif damage == "lengthen":
        file.write_bytes(content + b"\0")
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match=f"{name}' must .*it is built again"):
        open_store(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 0}, "must have format 1; got 0"),
        ({"shards": 3}, "it is damaged"),
        ({"documents": 2}, "it is damaged"),
        ({"documents": "x"}, "it is damaged"),
        ({"table": {}}, "it is damaged"),
    ],
)
def test_a_wrong_index_is_refused(change, message, tmp_path):
    """An index that does not describe its files is refused, whatever is wrong with it."""
    byte_store(tmp_path)
    index = tmp_path / "index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        open_store(tmp_path)


def test_a_store_of_other_sources_is_refused(tmp_path):
    """A store opens only under the fingerprint that its sources have now."""
    store = byte_store(tmp_path)
    assert open_store(tmp_path, store.fingerprint).fingerprint == store.fingerprint
    with pytest.raises(CheckpointError, match="was made from other sources"):
        open_store(tmp_path, "0" * 64)


def test_a_build_that_was_stopped_leaves_no_store(tmp_path):
    """A reader that fails half-way leaves no index, not even an older one."""

    def failing():
        yield DOCUMENTS[0]
        raise KeyboardInterrupt

    byte_store(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path, failing(), ByteTokenizer())
    with pytest.raises(CheckpointError, match=r"index.json' must be a readable file"):
        open_store(tmp_path)
    assert not list(tmp_path.glob(".*.part"))


def test_closed_files_are_not_read(tmp_path):
    """After `close` a store says so instead of reading."""
    store = byte_store(tmp_path)
    store.close()
    with pytest.raises(CheckpointError, match="closed"):
        store.tokens(0)


def test_rejects_a_tokenizer_without_an_end(tmp_path):
    """Documents cannot be kept apart without an id that ends a text."""
    tokenizer = NumberTokenizer()
    tokenizer.eos_id = None
    with pytest.raises(ConfigError, match="must have a token that ends a text"):
        write_store(tmp_path, DOCUMENTS, tokenizer)


def test_without_a_beginning_the_end_begins(tmp_path):
    """A tokenizer that has no id to begin a text begins it with the id that ends one."""
    tokenizer = NumberTokenizer()
    tokenizer.bos_id = None
    write_store(tmp_path, [Document("a", b"7 8")], tokenizer)
    ids_s, targets_s = open_store(tmp_path).piece(Span(0, 0, 3))
    assert (ids_s.tolist(), targets_s.tolist()) == ([END, 7, 8], [7, 8, END])


def test_the_folder_must_be_writable(tmp_path):
    """A file where the folder should be is told, with the setting that moves it."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"must be a folder .* Set data.cache_dir"):
        write_store(tmp_path / "file", DOCUMENTS, ByteTokenizer())


def test_unchanged_sources_are_not_tokenized_again(recipe, tmp_path):
    """A second run takes the token files as they are, even if the sources were touched."""
    cache = tmp_path / "cache"
    assert "train: wrote" in notes_of(recipe, cache)
    before = {file: file.stat().st_mtime_ns for file in cache.rglob("*.bin")}
    os.utime(tmp_path / "text" / "3.txt", (1, 1))
    notes = notes_of(recipe, cache)
    assert "train: reusing" in notes
    assert "valid: reusing" in notes
    assert {file: file.stat().st_mtime_ns for file in cache.rglob("*.bin")} == before


def test_changed_sources_are_tokenized_again(recipe, tmp_path):
    """One changed letter of the same length makes new tokens; the other side is reused."""
    cache = tmp_path / "cache"
    data = prepare_data(recipe, cache)
    first = data.fingerprints
    for number in range(20):
        file = tmp_path / "text" / f"{number}.txt"
        if file.read_bytes() == bytes(data.train.tokens(0).tolist()):
            file.write_bytes(file.read_bytes().replace(b"text", b"test"))
            break
    again = prepare_data(recipe, cache)
    assert again.fingerprints["train"] != first["train"]
    assert again.fingerprints["valid"] == first["valid"]
    assert b"test" in bytes(again.train.tokens(0).tolist())


def test_a_damaged_cache_is_built_again_and_told(recipe, tmp_path):
    """Damage costs the time of a build, never a wrong token; a note says what was wrong."""
    cache = tmp_path / "cache"
    expected = prepare_data(recipe, cache).train.tokens(0)
    file = only(cache, "train-*/tokens-*.bin")
    file.write_bytes(b"x" * file.stat().st_size)
    data = prepare_data(recipe, cache)
    assert any("built again, because" in note and "damaged" in note for note in data.notes)
    assert torch.equal(expected, data.train.tokens(0))
    only(cache, "train-*/index.json").write_text("{")
    assert "built again" in notes_of(recipe, cache)
    assert "train: reusing" in notes_of(recipe, cache)


def test_too_few_files_are_told_the_share_they_need(recipe, tmp_path):
    """When no file falls into the share, the message names one that works."""
    few = DataRecipe(train=recipe.train, valid_share=0.0001)
    with pytest.raises(ConfigError, match=r"Set data.valid_share=0\.\d+ to hold one out") as told:
        prepare_data(few, tmp_path / "cache")
    share = float(str(told.value).split("Set data.valid_share=")[1].split()[0])
    enough = prepare_data(DataRecipe(train=recipe.train, valid_share=share), tmp_path / "cache")
    assert enough.valid is not None
    assert len(enough.valid) == 1


def test_nothing_is_held_out_when_nothing_is_asked(recipe, tmp_path):
    """A share of 0 trains on everything, and there is no validation."""
    data = prepare_data(DataRecipe(train=recipe.train, valid_share=0.0), tmp_path / "cache")
    assert data.valid is None
    assert len(data.train) == 20
    assert set(data.fingerprints) == {"train"}


def test_a_corpus_without_text_is_refused(tmp_path):
    """Empty files, on either side, are no corpus."""
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.txt").touch()
    (tmp_path / "full.txt").write_text("text\n")
    full, empty = (str(tmp_path / name) for name in ("full.txt", "blank"))
    with pytest.raises(ConfigError, match="must leave text to train with"):
        prepare_data(DataRecipe(train=(empty,)), tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"data\.valid must hold text"):
        prepare_data(DataRecipe(train=(full,), valid=(empty,)), tmp_path / "cache")


def test_left_out_files_are_told(recipe, tmp_path):
    """A note counts what was left out, and names the first."""
    (tmp_path / "text" / "picture.png").write_bytes(b"\x89PNG\0")
    assert "left out 1 files: picture.png (it holds zero bytes)" in notes_of(recipe, tmp_path / "c")


def test_a_tokenizer_file_is_known_by_its_content(recipe, tmp_path):
    """Tokens are made again when the tokenizer's file changes, and its end mark is used."""

    def words(*more: str) -> DataRecipe:
        vocabulary = ["</s>", "?", "text", "of", *more]
        table = {word: number for number, word in enumerate(vocabulary)}
        file = plant_tokenizer(tmp_path / "tokenizer.json", table)
        return DataRecipe(train=recipe.train, tokenizer=file, valid_share=0.3)

    first = prepare_data(words("seven"), tmp_path / "cache")
    assert first.train.tokens(0).tolist() == [2, 3, 1] * 5
    assert (first.vocab_size, first.train.end_id) == (5, 0)
    assert "reusing" in notes_of(words("seven"), tmp_path / "cache")
    assert "reusing" not in notes_of(words("eight"), tmp_path / "cache")


def test_ids_with_gaps_have_room(recipe, tmp_path):
    """The largest id decides how wide tokens are stored, and how many rows a model needs."""
    table = {"</s>": 0, "?": 1, "text": 2, "of": 300}
    file = plant_tokenizer(tmp_path / "tokenizer.json", table)
    data = prepare_data(
        DataRecipe(train=recipe.train, tokenizer=file, valid_share=0.3), tmp_path / "cache"
    )
    assert data.train.tokens(0).tolist()[:2] == [2, 300]
    assert data.vocab_size == 301
