"""Laws of generated text: stop strings, streaming, chat whose memory is the state."""

import subprocess
import sys
import time

import pytest
import torch
from cli_schemas import SCHEMAS, problems
from hypothesis import given
from hypothesis import strategies as st

from anymamba.cli import StopText, first_ids, speak
from anymamba.errors import ConfigError
from anymamba.generate import stream
from anymamba.io import ByteTokenizer, load_pretrained, load_state, save_state
from anymamba.models import MambaConfig, MambaLM, scheme_of

BYTES = ByteTokenizer()


def ids_of(lm, prompt: str, count: int, **options) -> list[int]:
    return list(stream(lm, BYTES.encode(prompt), max_new_tokens=count, **options))


@given(
    pieces=st.lists(st.text("abc", max_size=3), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
)
def test_stop_text_shows_exactly_what_comes_before_a_stop(pieces, stops):
    """However the text is cut, what is shown is the text up to the first stop string."""
    text, stop = "".join(pieces), StopText(stops)
    shown = "".join(stop.push(piece) for piece in pieces)
    shown += "" if stop.hit else stop.flush()
    # The first stop string to be complete wins, not the first to begin.
    ends = sorted((place + len(s), place) for s in stops if (place := text.find(s)) >= 0)
    assert (stop.hit is None) == (not ends)
    if not ends:
        assert shown == text
    else:
        assert text.startswith(shown)
        assert not any(s in shown for s in stops)
        assert text[len(shown) :].startswith(stop.hit)


def test_stop_text_holds_back_as_little_as_possible():
    """Only what may become a stop string waits."""
    stop = StopText(["\nUser:", "END"])
    assert stop.push("hello") == "hello"
    assert stop.push(" E") == " "
    assert stop.push("Nx") == "ENx"
    assert stop.push("\nUs") == ""
    assert stop.push("er: x") == ""
    assert stop.hit == "\nUser:"
    assert stop.push("more") == ""


def test_an_empty_stop_string_is_refused():
    """It would end every text at once."""
    with pytest.raises(ConfigError, match="must not be empty"):
        StopText([""])


def test_generate_writes_what_the_library_generates(run, checkpoint):
    """Text, ids and JSON are those of `stream`; the speed goes to stderr."""
    lm = load_pretrained(checkpoint)
    want = ids_of(lm, "ab", 12, temperature=1.0, top_k=9, seed=3)
    options = ["--max-new-tokens", 12, "--temperature", 1, "--top-k", 9, "--seed", 3]
    result = run("generate", checkpoint, "--prompt", "ab", *options)
    assert result.code == 0
    assert result.out == BYTES.decode(want) + "\n"
    assert "12 tokens, " in result.err
    assert "tokens/s" in result.err
    document = run("generate", checkpoint, "--prompt", "ab", *options, "--json").document
    assert document["ids"] == want
    assert document["text"] == BYTES.decode(want)
    assert document["finish_reason"] == "length"
    assert ids_of(lm, "ab", 12, temperature=1.0, top_k=9, seed=4) != want


def test_the_speed_counts_steps_of_the_model(checkpoint, monkeypatch):
    """The first token comes out of the prompt: of n tokens n - 1 took a step each."""
    lm = load_pretrained(checkpoint)
    now = [0.0]
    advance = MambaLM.advance

    def slow(*arguments, **options):
        now[0] += 0.25
        return advance(*arguments, **options)

    monkeypatch.setattr(MambaLM, "advance", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    spoken = {n: speak(lm, BYTES, [65], lambda _: None, max_new_tokens=n) for n in (0, 1, 2, 5)}
    assert [len(speech.ids) for speech in spoken.values()] == [0, 1, 2, 5]
    assert [speech.tokens_per_second for speech in spoken.values()] == [None, None, 4.0, 4.0]
    assert spoken[5].summary().startswith("5 tokens, 4.0 tokens/s (prompt: 1 token in ")
    assert spoken[1].summary().startswith("1 token (prompt: ")


def test_one_token_tells_no_speed(run, checkpoint):
    """Neither a rate nor a share of the limit, in words and in JSON."""
    options = ["--prompt", "ab", "--max-new-tokens", 1]
    result = run("generate", checkpoint, *options)
    assert "per token; reading memory" in result.err
    assert "reached" not in result.err
    document = run("generate", checkpoint, *options, "--json").document
    assert problems(SCHEMAS["generate"], document) == []
    assert (document["tokens_per_second"], document["share_of_limit"]) == (None, None)


def test_the_prompt_may_come_from_stdin(run, checkpoint):
    """Without --prompt the text is read from stdin; --echo repeats it."""
    given_text = run("generate", checkpoint, "--prompt", "abc", "--max-new-tokens", 5).out
    piped = run("generate", checkpoint, "--max-new-tokens", 5, "--echo", stdin="abc").out
    assert piped == "abc" + given_text


def test_a_stop_string_ends_the_text(run, checkpoint):
    """The text ends before the stop string, of several the first."""
    lm = load_pretrained(checkpoint)
    options = {"temperature": 1.0, "seed": 1}
    text = BYTES.decode(ids_of(lm, "ab", 40, **options))
    stop = text[7:9]
    flags = ["--temperature", 1, "--seed", 1, "--max-new-tokens", 40]
    result = run(
        "generate", checkpoint, "--prompt", "ab", *flags, "--stop", stop, "--stop", "zzzz", "--json"
    )
    document = result.document
    assert document["text"] == text[: text.index(stop)]
    assert document["finish_reason"] == "stop"
    assert len(document["ids"]) < 40


def test_the_state_ends_where_the_text_ends(checkpoint):
    """Tokens of a stop string are taken back: the state is that of prompt and shown text."""
    lm = load_pretrained(checkpoint)
    ids = [65, 66]
    alphabet = [lambda _, logits: logits.masked_fill(torch.arange(256) > 126, -torch.inf)]
    options = {"temperature": 1.0, "processors": alphabet}
    whole = speak(lm, BYTES, ids, lambda _: None, max_new_tokens=20, **options)
    assert torch.equal(whole.cache.position, torch.tensor([22]))
    stop = whole.text[5:8]
    cut = speak(lm, BYTES, ids, lambda _: None, stops=[stop], max_new_tokens=20, **options)
    kept = BYTES.encode(cut.text)
    assert cut.text == whole.text[: whole.text.index(stop)]
    want = stream(lm, ids + kept, max_new_tokens=0).cache
    assert torch.equal(cut.cache.position, torch.tensor([2 + len(kept)]))
    for name, tensor in want.to_tensors().items():
        torch.testing.assert_close(cut.cache.to_tensors()[name], tensor)


def test_an_empty_prompt_begins_with_a_mark():
    """The tokenizer's mark stands for the empty text; without one it is refused."""

    class NoMark(ByteTokenizer):
        eos_id = None

    assert first_ids(BYTES, "") == [256]
    assert first_ids(BYTES, "a") == [97]
    with pytest.raises(ConfigError, match="must not be empty"):
        first_ids(NoMark(), "")


def test_a_model_without_tokenizer_is_explained(run, tmp_path):
    """A vocabulary that is not bytes needs --tokenizer; the message says how."""
    MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=50277)).save_pretrained(tmp_path)
    result = run("generate", tmp_path, "--prompt", "a")
    assert result.code == 2
    assert "--tokenizer" in result.err
    assert "gpt-neox" in result.err


def chat(run, checkpoint, *lines: str):
    result = run(
        "chat", checkpoint, "--max-new-tokens", 4, "--json", stdin="".join(f"{x}\n" for x in lines)
    )
    assert result.code == 0, result.err
    for document in result.documents:
        assert problems(SCHEMAS["chat"], document) == []
    return result.documents


def test_chat_equals_one_long_text(run, checkpoint):
    """Turn by turn with the state kept is the same as reading everything again."""
    first, second = chat(run, checkpoint, "hello", "again")
    lm = load_pretrained(checkpoint)
    start = BYTES.encode("User: hello\nAssistant:")
    assert first["ids"] == list(stream(lm, start, max_new_tokens=4))
    everything = start + first["ids"] + BYTES.encode("\nUser: again\nAssistant:")
    assert second["ids"] == list(stream(lm, everything, max_new_tokens=4))
    assert second["position"] == len(everything) + 4
    assert (first["turns"], second["turns"]) == (1, 2)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_quantize_computes_with_integers(run, checkpoint, tmp_path, monkeypatch, command, scheme):
    """`generate` and `chat` load the model quantised; its states are saved and loaded as ever."""
    models = []

    def watched(lm, *arguments, **options):
        models.append(lm)
        return speak(lm, *arguments, **options)

    monkeypatch.setattr(f"anymamba.cli.{command}.speak", watched)
    file = tmp_path / "talk.state"
    lines = f"hello\n/save {file}\n/load {file}\n" if command == "chat" else "hello"
    options = ["--quantize", scheme, "--max-new-tokens", 4, "--json"]
    result = run(command, checkpoint, *options, stdin=lines)
    assert result.code == 0, result.err
    assert all(document["ok"] for document in result.documents)
    assert [scheme_of(lm) for lm in models] == [scheme]
    prompt = "User: hello\nAssistant:" if command == "chat" else "hello"
    lm = load_pretrained(checkpoint, quantize=scheme)
    assert result.documents[0]["ids"] == ids_of(lm, prompt, 4)


def test_undo_forgets_a_turn(run, checkpoint):
    """After /undo the same line gets the same answer; the beginning cannot be undone."""
    events = chat(run, checkpoint, "/undo", "hello", "one", "/undo", "one", "/undo", "/undo")
    refused, _, answer, undone, again, *_, last = events
    assert refused["event"] == "error"
    assert "beginning" in refused["error"]["message"]
    assert undone["turns"] == 1
    assert again["ids"] == answer["ids"]
    assert again["position"] == answer["position"]
    assert (last["turns"], last["position"]) == (0, 0)


def test_fork_leaves_the_other_branch_alone(run, checkpoint):
    """A branch goes its own way; switching back finds the old state."""
    events = chat(
        run,
        checkpoint,
        "hello",
        "/fork side",
        "left",
        "/switch main",
        "left",
        "/switch nowhere",
        "/fork side",
    )
    _, forked, left, back, again, nowhere, taken = events
    assert (forked["branch"], forked["turns"]) == ("side", 1)
    assert (back["branch"], back["turns"]) == ("main", 1)
    assert again["ids"] == left["ids"]
    assert "There are: main, side" in nowhere["error"]["message"]
    assert "/switch side" in taken["error"]["message"]


def test_save_and_load_resume_a_conversation(run, checkpoint, tmp_path):
    """A saved state goes on in another process as if nothing had happened."""
    file = tmp_path / "talk.state"
    *_, saved, answer = chat(run, checkpoint, "hello", f"/save {file}", "more")
    assert saved["event"] == "save"
    assert int(load_state(file).position[0]) == saved["position"]
    loaded, resumed = chat(run, checkpoint, f"/load {file}", "more")
    assert loaded["position"] == saved["position"]
    assert resumed["ids"] == answer["ids"]
    assert resumed["position"] == answer["position"]


def test_chat_survives_mistakes(run, checkpoint, tmp_path):
    """Unknown commands, missing files, foreign states and missing names are explained."""
    foreign = tmp_path / "foreign.state"
    other = MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=256))
    save_state(other.empty_cache(1), foreign)
    own = load_pretrained(checkpoint).empty_cache(1)
    save_state(own.layers[0], tmp_path / "block.state")
    lines = [
        "/fly",
        "/save",
        "/undo now",
        "/save x",
        f"/load {tmp_path / 'missing'}",
        f"/load {foreign}",
        f"/load {tmp_path / 'block.state'}",
    ]
    *errors, answer = chat(run, checkpoint, *lines, "hello")
    assert [error["event"] for error in errors] == ["error"] * len(lines)
    assert answer["event"] == "answer"
    assert answer["turns"] == 1


def test_text_that_is_not_utf8_is_refused(run, checkpoint, tmp_path):
    """Prompts, files and overrides are refused with a reason; a chat survives the turn."""
    (tmp_path / "bad.txt").write_bytes(b"ba\xffd")
    for command in (
        ["generate", checkpoint, "--echo", "--prompt", "ba\udcffd"],
        ["inspect", checkpoint, "--length", 0, "--text", tmp_path / "bad.txt"],
        ["train", "--describe", "--set", "loop.out=ba\udcffd"],
    ):
        result = run(*command)
        assert result.code == 2, command
        assert "UTF-8" in result.err
    result = run("chat", checkpoint, "--max-new-tokens", 2, "--json", stdin="ba\udcffd\nhello\n")
    assert [entry["event"] for entry in result.documents] == ["error", "answer"]


def test_stdin_that_is_not_utf8_is_refused(checkpoint):
    """Bytes on stdin are refused like those of an argument."""
    command = [sys.executable, "-m", "anymamba", "generate", str(checkpoint)]
    done = subprocess.run(command, input=b"ba\xffd", capture_output=True, timeout=300)
    assert done.returncode == 2
    assert b"UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


def test_chat_answers_in_plain_text_too(run, checkpoint):
    """Without --json the answer is on stdout, help lists every command, /quit ends."""
    result = run("chat", checkpoint, "--max-new-tokens", 4, stdin="hello\n\n/help\n/quit\nnever\n")
    assert result.code == 0
    for command in ("/save FILE", "/load FILE", "/fork NAME", "/undo", "/quit", "/switch NAME"):
        assert command in result.out
    assert result.err.count("tokens/s") == 1
