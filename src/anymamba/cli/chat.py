"""`anymamba chat MODEL`: a conversation whose memory is the model's state."""

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import UseAppendAction, arg

from anymamba.cli.options import SamplingOptions, SpeakerOptions
from anymamba.cli.speech import first_ids, speak
from anymamba.cli.terminal import Terminal
from anymamba.errors import AnyMambaError, CacheError, ConfigError

if TYPE_CHECKING:
    from anymamba.nn import ModelCache

__all__ = ["Chat", "Talk"]

HELP = """\
/save FILE    write the state to a file
/load FILE    go on from the state in a file; /undo takes it back
/fork NAME    start a branch here and go on in it
/switch NAME  go to another branch; the first is called main
/undo         forget the last turn
/help         this list
/quit         end (so does the end of input)"""
WITH_ARGUMENT = ("/save", "/load", "/fork", "/switch")
WITHOUT_ARGUMENT = ("/undo", "/help", "/quit")


@dataclass
class Talk:
    """Branches of a conversation: each a list of states, the newest last; None is the beginning.

    A state is a value, so remembering one is all that undo and fork need.
    """

    branch: str = "main"
    branches: "dict[str, list[ModelCache | None]]" = field(default_factory=lambda: {"main": [None]})

    @property
    def state(self) -> "ModelCache | None":
        """The state of this branch."""
        return self.branches[self.branch][-1]

    @property
    def turns(self) -> int:
        """How many states lie behind this one."""
        return len(self.branches[self.branch]) - 1

    @property
    def tokens(self) -> int:
        """How many tokens this branch has seen."""
        return 0 if self.state is None else int(self.state.position_b[0])

    def add(self, state: "ModelCache") -> None:
        """Go on to a new state."""
        self.branches[self.branch].append(state)

    def undo(self) -> None:
        """Forget the newest state."""
        if self.turns == 0:
            raise ConfigError("/undo: there must be a turn to forget; this is the beginning.")
        self.branches[self.branch].pop()

    def fork(self, name: str) -> None:
        """Start a branch here and go on in it."""
        if name in self.branches:
            raise ConfigError(f"/fork: the name must be new; {name!r} exists. Use /switch {name}.")
        self.branches[name] = list(self.branches[self.branch])
        self.branch = name

    def switch(self, name: str) -> None:
        """Go to another branch."""
        if name not in self.branches:
            known = ", ".join(self.branches)
            raise ConfigError(f"/switch: the branch must exist; got {name!r}. There are: {known}.")
        self.branch = name


@dataclass(frozen=True, kw_only=True)
class Chat(SamplingOptions, SpeakerOptions):
    """Talk with a model; it keeps the state between turns. Type /help for the commands."""

    system: Annotated[str, arg(metavar="TEXT")] = ""
    """Text before the first turn."""

    user: Annotated[str, arg(metavar="TEXT")] = "User: "
    """Written before each of your lines."""

    assistant: Annotated[str, arg(metavar="TEXT")] = "Assistant:"
    """Written before each answer."""

    stop: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TEXT")] = ()
    """An answer ends before this text; a new line with --user always ends it."""

    def run(self, terminal: Terminal) -> int:
        """Read lines until the end of input or /quit."""
        lm, tokenizer = self.load_speaker()
        talk = Talk()
        terminal.out.print("Type a line, /help for the commands, /quit to end.", style="dim")
        while (line := _read(terminal, talk)) is not None:
            if not line.strip():
                continue
            try:
                if line.startswith("/"):
                    if not self._command(terminal, lm, talk, line):
                        break
                else:
                    self._turn(terminal, lm, tokenizer, talk, line)
            except BrokenPipeError:
                raise
            except KeyboardInterrupt:
                terminal.err.print("[dim]stopped; this turn is forgotten[/]")
            except (AnyMambaError, OSError) as error:
                # A mistyped file name must not end the conversation.
                terminal.err.print(str(error), style="red", markup=False)
                message = {"type": type(error).__name__, "message": str(error)}
                terminal.document(ok=False, event="error", error=message)
        return 0

    def _turn(self, terminal: Terminal, lm: Any, tokenizer: Any, talk: Talk, line: str) -> None:
        is_opening = talk.state is None
        before = self.system if is_opening else "\n"
        prompt = f"{before}{self.user}{line}\n{self.assistant}"
        speech = speak(
            lm,
            tokenizer,
            first_ids(tokenizer, prompt, is_opening=is_opening),
            terminal.text,
            stops=(f"\n{self.user.rstrip()}", *self.stop),
            cache=talk.state,
            **self.sampling(),
        )
        talk.add(speech.cache)
        terminal.text("\n")
        terminal.err.print(speech.summary(), style="dim")
        terminal.document(ok=True, event="answer", **_where(talk), **speech.facts())

    def _command(self, terminal: Terminal, lm: Any, talk: Talk, line: str) -> bool:
        """Obey a line that begins with a slash; return whether to go on."""
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if name in WITH_ARGUMENT and not rest:
            raise ConfigError(f"{name}: needs a name behind it; got none. Type /help.")
        if name in WITHOUT_ARGUMENT and rest:
            raise ConfigError(f"{name}: takes nothing behind it; got {rest!r}. Type /help.")
        match name:
            case "/quit":
                return False
            case "/help":
                terminal.out.print(HELP, markup=False)
            case "/save":
                _save(talk, rest)
            case "/load":
                talk.add(_load(lm, rest))
            case "/fork":
                talk.fork(rest)
            case "/switch":
                talk.switch(rest)
            case "/undo":
                talk.undo()
            case _:
                raise ConfigError(f"{name}: there is no such command. Type /help.")
        if name != "/help":
            where = f"branch {talk.branch}, turn {talk.turns}, {talk.tokens} tokens"
            terminal.out.print(f"{name[1:]}: {where}", style="dim", markup=False)
        terminal.document(ok=True, event=name[1:], **_where(talk))
        return True


def _where(talk: Talk) -> dict[str, Any]:
    return {"branch": talk.branch, "turns": talk.turns, "position": talk.tokens}


def _read(terminal: Terminal, talk: Talk) -> str | None:
    """Return the next line, or None at the end of input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    try:
        return input("> " if talk.branch == "main" else f"{talk.branch}> ")
    except EOFError:
        terminal.text("\n")
        return None


def _save(talk: Talk, file: str) -> None:
    from anymamba.io import save_state

    if talk.state is None:
        raise CacheError(
            "/save: there must be a state to save; this is the beginning. Say something."
        )
    save_state(talk.state, file)


def _load(lm: Any, file: str) -> "ModelCache":
    from anymamba.generate import stream
    from anymamba.io import load_state
    from anymamba.nn import ModelCache

    state = load_state(file, device=next(lm.parameters()).device)
    if not isinstance(state, ModelCache):
        raise CacheError(
            f"/load: {file!r} must hold the state of a model; got {type(state).__name__}."
        )
    # One token on a copy: a state of another model is refused here and not in the next turn.
    stream(lm, [0], max_new_tokens=0, cache=state)
    return state
