"""`anymamba generate MODEL`: continue a text, streaming."""

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import UseAppendAction, arg

from anymamba.cli.options import SamplingOptions, SpeakerOptions
from anymamba.cli.speech import first_ids, speak
from anymamba.cli.terminal import Terminal, human_bytes

__all__ = ["Generate", "prompt_progress"]

# Prompts below this are read before a bar could be drawn.
LONG_PROMPT = 4096


@dataclass(frozen=True, kw_only=True)
class Generate(SamplingOptions, SpeakerOptions):
    """Continue a text; it streams to stdout, the speed goes to stderr."""

    prompt: Annotated[str | None, arg(metavar="TEXT")] = None
    """The text to continue; read from stdin if left out."""

    stop: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TEXT")] = ()
    """End before this text; may be given several times."""

    echo: bool = False
    """Write the prompt first."""

    def run(self, terminal: Terminal) -> int:
        """Generate, streaming."""
        from anymamba.bench import token_limit

        prompt = sys.stdin.read() if self.prompt is None else self.prompt
        lm, tokenizer = self.load_speaker()
        # Before it is written: a text that is not UTF-8 could be neither.
        ids = first_ids(tokenizer, prompt)
        if self.echo:
            terminal.text(prompt)
        with prompt_progress(terminal, len(ids)) as progress:
            speech = speak(
                lm,
                tokenizer,
                ids,
                terminal.text,
                stops=self.stop,
                progress=progress,
                **self.sampling(),
            )
        terminal.text("\n")
        limit = token_limit(lm, speech.cache)
        speed = speech.tokens_per_second
        share = None if speed is None else limit.share(speed)
        terminal.err.print(speech.summary(), style="dim")
        terminal.err.print(
            f"{human_bytes(limit.bytes_per_token)} per token; reading memory at "
            f"{limit.bandwidth / 1e9:.3g} GB/s would allow {limit.tokens_per_second:.0f} tokens/s"
            + ("" if share is None else f": {share:.0%} reached"),
            style="dim",
        )
        terminal.document(
            ok=True,
            model=self.model,
            prompt=prompt,
            **speech.facts(),
            bytes_per_token=limit.bytes_per_token,
            share_of_limit=share,
        )
        return 130 if speech.finish_reason == "interrupt" else 0


def prompt_progress(terminal: Terminal, total: int) -> Any:
    """Return a context whose value is told how far a long prompt was read, or None."""
    if total < LONG_PROMPT or not terminal.err.is_terminal:
        return nullcontext(None)
    return _Bar(terminal, total)


class _Bar:
    """A progress bar on stderr that goes away when the prompt is read."""

    def __init__(self, terminal: Terminal, total: int) -> None:
        from rich.progress import Progress

        self._progress = Progress(console=terminal.err, transient=True)
        self._task = self._progress.add_task("reading the prompt", total=total)

    def __enter__(self) -> Any:
        self._progress.start()
        return self._update

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _update(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done)
        if done == total:
            self._progress.stop()
