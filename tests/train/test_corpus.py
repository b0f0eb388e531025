"""Laws of corpora: a fixed order, sides that never change, and no text lost in silence."""

import json
import sys
import types
from pathlib import Path

import pytest

from anymamba.errors import ConfigError
from anymamba.train import Corpus, DataRecipe, place_of


def plant(root: Path, files: dict[str, str | bytes]) -> str:
    """Write files below a folder; returns the folder."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(root)


def names(corpus: Corpus, split) -> list[str]:
    return [document.name for document in corpus.documents(split)]


def whole(*paths: str, **options) -> Corpus:
    """Return a corpus that holds nothing out."""
    return Corpus(DataRecipe(train=paths, valid_share=0.0, **options))


def test_files_come_by_name_and_once(tmp_path):
    """Folders are read by relative name, paths in the order given, no file twice."""
    first = plant(tmp_path / "a", {"z.txt": "1", "b/y.txt": "2", "b.txt": "3", ".hid/x": "4"})
    second = plant(tmp_path / "c", {"k.txt": "5", ".hidden": "6"})
    corpus = whole(second, first, f"{first}/b/../z.txt")
    assert names(corpus, "train") == ["k.txt", "b.txt", "b/y.txt", "z.txt"]
    assert [d.text for d in corpus.documents("train")] == [b"5", b"3", b"2", b"1"]
    assert not corpus.holds_out


def test_links_to_folders_are_not_followed(tmp_path):
    """A folder that links to itself is read once; a linked file is read."""
    folder = plant(tmp_path / "a", {"x.txt": "1"})
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")
    plant(tmp_path, {"outside.txt": "2"})
    (tmp_path / "a" / "linked.txt").symlink_to(tmp_path / "outside.txt")
    assert names(whole(folder), "train") == ["linked.txt", "x.txt"]


def test_a_new_file_moves_no_old_one(tmp_path):
    """The side of a file depends on its name alone."""
    files: dict[str, str | bytes] = {f"{number}.txt": "text" for number in range(60)}
    recipe = DataRecipe(train=(plant(tmp_path, files),), valid_share=0.3)
    train, valid = (set(names(Corpus(recipe), split)) for split in ("train", "valid"))
    assert train | valid == set(files)
    assert not train & valid
    assert 8 <= len(valid) <= 28
    plant(tmp_path, {f"new/{number}.txt": "more" for number in range(20)})
    assert train <= set(names(Corpus(recipe), "train"))
    assert valid <= set(names(Corpus(recipe), "valid"))


def test_places_are_fixed_for_good_and_even():
    """The place of a name is the same in every version, or resumed runs would mix the sides."""
    assert place_of("a.txt") == pytest.approx(0.0965544604, abs=1e-9)
    places = [place_of(str(number)) for number in range(4000)]
    assert sum(place < 0.25 for place in places) == pytest.approx(1000, abs=100)


def test_named_files_are_held_out(tmp_path):
    """With `valid`, its files are held out, and nothing of `train` is."""
    train = plant(tmp_path / "train", {f"{number}": "x" for number in range(30)})
    valid = plant(tmp_path / "valid", {"a": "1", "b": "2"})
    corpus = Corpus(DataRecipe(train=(train,), valid=(valid,), valid_share=0.5))
    assert len(names(corpus, "train")) == 30
    assert names(corpus, "valid") == ["a", "b"]
    with pytest.raises(ConfigError, match="is in both"):
        Corpus(DataRecipe(train=(train,), valid=(f"{train}/3",)))


def test_a_single_file_is_cut_behind_a_line(tmp_path):
    """The only file gives its last lines away; both parts together are the file."""
    text = "".join(f"line {number}\n" for number in range(100))
    folder = plant(tmp_path, {"only.txt": text})
    corpus = Corpus(DataRecipe(train=(folder,), valid_share=0.25))
    (head,), (tail,) = (list(corpus.documents(split)) for split in ("train", "valid"))
    assert head.text + tail.text == text.encode()
    assert head.text.endswith(b"\n")
    assert len(tail.text) == pytest.approx(0.25 * len(text), abs=10)
    plant(tmp_path, {"only.txt": "no line at all"})
    with pytest.raises(ConfigError, match="it must have several lines"):
        names(corpus, "train")


@pytest.mark.parametrize(
    ("text", "held"),
    [("title\n" + "x" * 1000, r"99\.4%"), ("x" * 1000 + "\nend\n", r"0\.4%")],
)
def test_rejects_a_text_whose_lines_end_far_from_the_share(text, held, tmp_path):
    """One very long line must not decide silently how much is held out."""
    folder = plant(tmp_path, {"only.txt": text})
    corpus = Corpus(DataRecipe(train=(folder,), valid_share=0.1))
    with pytest.raises(ConfigError, match=f"must end near the last 10.0% of it.* out {held}"):
        names(corpus, "train")


def test_the_nearest_line_is_taken_on_either_side(tmp_path):
    """A line that ends shortly after the wanted place is nearer than one long before."""
    folder = plant(tmp_path, {"only.txt": "a\n" + "b" * 80 + "\n" + "c" * 17})
    corpus = Corpus(DataRecipe(train=(folder,), valid_share=0.2))
    assert [d.text for d in corpus.documents("valid")] == [b"c" * 17]


def test_a_single_usable_text_is_cut(tmp_path):
    """Files that are no text, or empty, do not count as a second one."""
    text = "".join(f"line {number}\n" for number in range(100))
    folder = plant(tmp_path, {"only.txt": text, "b.bin": b"a\0b", "empty.txt": ""})
    corpus = Corpus(DataRecipe(train=(folder,), valid_share=0.25))
    assert names(corpus, "train") == ["only.txt:head"]
    assert names(corpus, "valid") == ["only.txt:tail"]


def test_what_a_run_has_written_is_no_text(tmp_path):
    """The folders of the run itself, of other runs and of tokens are left out."""
    run: dict[str, str | bytes] = {"runs/a/recipe.toml": "", "runs/a/metrics.jsonl": "{}"}
    store: dict[str, str | bytes] = {"t/index.json": "{}", "t/documents.bin": "x"}
    folder = plant(tmp_path, {**run, **store, "runs/a/report.md": "r", "own/x": "y", "a.txt": "t"})
    recipe = DataRecipe(train=(folder,), valid_share=0.0)
    assert names(Corpus(recipe, without=[tmp_path / "own"]), "train") == ["a.txt"]
    with pytest.raises(ConfigError, match="the run would keep its own files in the same folder"):
        Corpus(recipe, without=[tmp_path])


def test_lines_of_json_are_documents(tmp_path):
    """Each line is a document with a name of its own; empty lines and other files are passed."""
    rows = [json.dumps({"body": f"text {number}"}) for number in range(40)]
    folder = plant(tmp_path, {"a.jsonl": "\n\n".join(rows) + "\n", "readme.md": "no"})
    recipe = DataRecipe(train=(folder,), kind="jsonl", text_key="body", valid_share=0.3)
    corpus = Corpus(recipe)
    train, valid = (list(corpus.documents(split)) for split in ("train", "valid"))
    texts = {document.text.decode() for document in train + valid}
    assert texts == {f"text {number}" for number in range(40)}
    assert len(train) + len(valid) == 40
    assert valid
    assert {document.name for document in train}.isdisjoint(d.name for d in valid)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "line 2 must be JSON"),
        ('{"body": "a"}', r"line 2 must hold a string under 'text'; got keys \['body'\]"),
        ('{"text": 3}', "line 2 must hold a string under 'text'"),
        ('["text"]', "line 2 must hold a string under 'text'; got list"),
        ('{"text": "\\ud800"}', "line 2 must hold a whole text"),
    ],
)
def test_rejects_a_wrong_line(line, message, tmp_path):
    """A line that holds no text is refused with its number."""
    folder = plant(tmp_path, {"a.jsonl": '{"text": "fine"}\n' + line + "\n"})
    with pytest.raises(ConfigError, match=message):
        names(whole(folder, kind="jsonl"), "train")


def test_what_is_no_text_is_left_out_and_told(tmp_path):
    """In a folder, files that are not UTF-8 are noted; a file that was named itself is refused."""
    folder = plant(tmp_path, {"a.txt": "fine", "b.txt": b"gr\xfcn", "c.bin": b"a\0b", "d": ""})
    corpus = whole(folder)
    assert names(corpus, "train") == ["a.txt"]
    assert corpus.skipped == {"b.txt": "byte 2 is not UTF-8", "c.bin": "it holds zero bytes"}
    with pytest.raises(ConfigError, match=r"b.txt' must be text in UTF-8; byte 2 is not UTF-8"):
        names(whole(f"{folder}/b.txt"), "train")
    plant(tmp_path, {"x.jsonl": b"\xff\n"})
    with pytest.raises(ConfigError, match="must be text in UTF-8"):
        names(whole(folder, kind="jsonl"), "train")


def test_rejects_what_is_not_there(tmp_path):
    """A path that leads nowhere, an empty folder and a lost file are refused by name."""
    with pytest.raises(ConfigError, match="absent' must be a file or a folder; there is none"):
        whole(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="must hold files; there are none"):
        whole(str(tmp_path))
    folder = plant(tmp_path, {"a.txt": "fine", "b.txt": "fine"})
    with pytest.raises(ConfigError, match=r"must hold files that end in \.jsonl"):
        whole(folder, kind="jsonl")
    corpus = whole(folder)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ConfigError, match=r"a.txt' must be readable"):
        names(corpus, "train")


def test_the_default_corpus_is_the_standard_library():
    """Without paths there are Python sources on both sides, and no installed packages."""
    corpus = Corpus(DataRecipe())
    train, valid = (names(corpus, split) for split in ("train", "valid"))
    both = train + valid
    assert {"json/decoder.py", "argparse.py", "typing.py"} <= set(both)
    assert train == sorted(train)
    assert len(valid) >= 10
    assert all(name.endswith(".py") for name in both)
    assert not any({"site-packages", "test"} & set(Path(name).parts) for name in both)


def test_the_smallest_share_holds_one_document_out(tmp_path):
    """The share that a message advises is enough, and a thousandth less is not."""
    folder = plant(tmp_path, {f"{number}.txt": "x" for number in range(3)})
    share = whole(folder).smallest_share()
    assert len(names(Corpus(DataRecipe(train=(folder,), valid_share=share)), "valid")) == 1
    less = DataRecipe(train=(folder,), valid_share=share - 0.001)
    assert names(Corpus(less), "valid") == []


def test_a_data_set_is_read_row_by_row(monkeypatch):
    """`datasets` is asked for the split "train"; rows are held out by their number."""
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return [{"body": f"row {number}"} for number in range(50)]

    library = types.ModuleType("datasets")
    library.load_dataset = load_dataset  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "datasets", library)
    corpus = Corpus(DataRecipe(dataset="owner/name:part", text_key="body", valid_share=0.2))
    train, valid = (list(corpus.documents(split)) for split in ("train", "valid"))
    assert asked == [(("owner/name", "part"), {"split": "train"})]
    assert sorted(d.text.decode() for d in train + valid) == sorted(f"row {n}" for n in range(50))
    assert 0 < len(valid) < 25
    with pytest.raises(ConfigError, match="row 0 must hold a string under 'text'"):
        names(Corpus(DataRecipe(dataset="owner/name")), "train")


def test_rejects_a_data_set_that_cannot_be_loaded(monkeypatch):
    """Without the library, and when it fails, the message says what to do."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="needs the package datasets"):
        Corpus(DataRecipe(dataset="name"))
    library = types.ModuleType("datasets")
    library.load_dataset = lambda *_, **__: 1 / 0  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(ConfigError, match="must be a data set with a split 'train'; division"):
        Corpus(DataRecipe(dataset="name"))
