"""Laws of tokenizers and of incremental decoding."""

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anymamba.errors import CheckpointError, ConfigError
from anymamba.io import ByteTokenizer, IncrementalDecoder, Tokenizer, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")

CORPUS = [
    "the cat sat on the mat",
    "naïve café",
    "日本語のテキスト",
    "🙂🙃 emoji 👩‍👩‍👧",
    "x = [1, 2]\n\n",
]
SPECIAL = ["<|endoftext|>", "<|begin_of_text|>"]


def byte_level():
    """Return a small byte-level BPE as GPT-NeoX has it, with special tokens."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS, trainer)
    return inner


def word_level():
    """Return a tokenizer whose decoder drops the space before the first word."""
    words = ["</s>", "▁the", "▁cat", "▁sat", "s"]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="</s>")
    inner = tokenizers.Tokenizer(model)
    inner.decoder = tokenizers.decoders.Metaspace()
    inner.add_special_tokens(["</s>"])
    return inner


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def bpe(folder):
    return load_tokenizer(folder)


def streamed(tokenizer, ids):
    """Return the pieces of text, the flushed rest last."""
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


# Hypothesis also tries strings that it finds in the package, names of special tokens among them.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(
    lambda text: not any(name in text for name in SPECIAL)
)


@settings(max_examples=150, deadline=None)
@given(TEXT)
def test_decode_inverts_encode(bpe, text):
    """Every text comes back."""
    for tokenizer in (ByteTokenizer(), bpe):
        assert text == tokenizer.decode(tokenizer.encode(text))


@pytest.mark.parametrize("name", SPECIAL)
def test_the_name_of_a_special_token_is_that_token(bpe, name):
    """As everywhere: so a prompt can hold one. Its text does not come back."""
    ids = bpe.encode(f"the {name} cat")
    assert ids == [*bpe.encode("the "), SPECIAL.index(name), *bpe.encode(" cat")]
    assert bpe.decode(ids) == "".join(streamed(bpe, ids)) == "the  cat"


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_streamed_text_is_the_text_in_whole_characters(bpe, text):
    """The pieces join to the text, and none of them holds half a character."""
    for tokenizer in (ByteTokenizer(), bpe):
        pieces = streamed(tokenizer, tokenizer.encode(text))
        assert text == "".join(pieces)
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=40))
def test_streamed_bytes_decode_as_the_whole(ids):
    """Broken characters too: the pieces join to what decoding all ids at once gives."""
    assert ByteTokenizer().decode(ids) == "".join(streamed(ByteTokenizer(), ids))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_streamed_ids_decode_as_the_whole(bpe, data):
    """The same for random ids of a byte-level vocabulary, special tokens among them."""
    ids = data.draw(st.lists(st.integers(0, bpe.vocab_size - 1), max_size=40))
    assert bpe.decode(ids) == "".join(streamed(bpe, ids))


def test_streaming_keeps_spaces_that_a_decoder_drops_in_front(tmp_path):
    """A word keeps its space in the middle of a text, even after a token without text."""
    word_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    ids = [1, 2, 4, 0, 0, 3, 1]
    assert streamed(tokenizer, ids) == ["the", " cat", "s", "", "", " sat", " the", ""]
    assert tokenizer.decode(ids) == "the cats sat the"


def test_streaming_waits_for_whole_characters_only():
    """A letter appears at once, a character of three bytes with its third."""
    assert streamed(ByteTokenizer(), "a€b".encode()) == ["a", "", "", "€", "b", ""]
    assert streamed(ByteTokenizer(), "a€".encode()[:-1]) == ["a", "", "", "\ufffd"]


def test_flush_starts_anew():
    """After a flush the decoder is as new."""
    decoder = IncrementalDecoder(ByteTokenizer())
    decoder.push(0xE2)
    assert decoder.flush() == "\ufffd"
    assert decoder.push(ord("x")) == "x"
    assert decoder.flush() == ""


def test_streaming_costs_the_same_for_every_token():
    """The decoder looks back at a few tokens, not at the whole text."""

    class Counting(ByteTokenizer):
        longest = 0

        def decode(self, ids):
            self.longest = max(self.longest, len(ids))
            return super().decode(ids)

    tokenizer = Counting()
    streamed(tokenizer, tokenizer.encode("für 🙂 " * 200))
    assert tokenizer.longest <= 8


def test_tokenizers_satisfy_the_protocol(bpe):
    """What the library offers is what the library asks for."""
    for tokenizer in (ByteTokenizer(), bpe):
        assert isinstance(tokenizer, Tokenizer)
        assert max(tokenizer.encode("abc")) < tokenizer.vocab_size
    assert ByteTokenizer().eos_id == 256
    assert (bpe.eos_id, bpe.bos_id) == (0, 1)
    assert bpe.decode([0, *bpe.encode("hi"), 0]) == "hi"
    assert load_tokenizer("bytes").vocab_size == 257


def test_config_beside_the_file_names_the_special_tokens(folder, tmp_path):
    """Both spellings of an entry are understood; without an entry the usual names count."""
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    entries = {"eos_token": {"content": "<|begin_of_text|>"}, "bos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
    swapped = load_tokenizer(tmp_path)
    assert (swapped.eos_id, swapped.bos_id) == (1, 0)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert load_tokenizer(tmp_path).eos_id == 0


def test_special_tokens_of_the_file_are_optional(folder, tmp_path):
    """A file that puts a mark in front does so unless told not to."""
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 1)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [1, *plain]


def test_long_texts_are_not_cut(folder, tmp_path):
    """Truncation and padding of the file are not obeyed."""
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.enable_truncation(3)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    text = "the cat sat on the mat " * 3
    tokenizer = load_tokenizer(tmp_path)
    assert text == tokenizer.decode(tokenizer.encode(text))
    assert len(tokenizer.encode("a")) == 1


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": ', b"\x80\x04pickle", b"[" * 10000])
def test_rejects_damaged_files(tmp_path, content):
    """A file that is no tokenizer is refused by name."""
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"load_tokenizer: .*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_rejects_what_is_not_there(tmp_path, monkeypatch):
    """A missing file, an empty directory and an unreachable name are refused with the choices."""
    for missing in (tmp_path, tmp_path / "tokenizer.json", tmp_path / "a" / "b"):
        with pytest.raises(CheckpointError, match="must be a file; there is none"):
            load_tokenizer(missing)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="pip install"):
        load_tokenizer("owner/name")


def test_asks_for_the_missing_package(folder, monkeypatch):
    """Without the tokenizers package the error says what to install."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(CheckpointError, match="pip install"):
        load_tokenizer(folder)


def test_names_are_looked_up_on_the_hub(folder, monkeypatch):
    """A name that is no file goes to the hub's client, revision and all."""
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def download(name, file, revision=None):
        asked.append((name, file, revision))
        if file != "tokenizer.json":
            raise hub.errors.EntryNotFoundError("no such file")
        return str(folder / file)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    assert load_tokenizer("owner/name", revision="refs/pr/1").eos_id == 0
    assert asked[0] == ("owner/name", "tokenizer.json", "refs/pr/1")


def test_rejects_ids_that_are_no_bytes():
    """An id of another tokenizer is not printed as something else."""
    with pytest.raises(ConfigError, match=r"ids must lie in 0\.\.256; got 257"):
        ByteTokenizer().decode([65, 257])


def test_rejects_text_that_is_not_utf8(bpe):
    """A byte of the terminal that is no character is refused with its place."""
    for tokenizer in (bpe, ByteTokenizer()):
        with pytest.raises(ConfigError, match=r"text must be UTF-8; character 2 is '.udcff'"):
            tokenizer.encode("ba\udcffd")


def test_ids_with_gaps_count_to_the_largest(tmp_path):
    """A model needs a row for every id up to the largest, whether it has a token or not."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "a": 9}, unk_token="</s>"))
    inner.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).vocab_size == 10
