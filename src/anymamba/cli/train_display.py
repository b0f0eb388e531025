"""What a person sees of a run while it trains: a live picture, or lines where no terminal is."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from anymamba.cli.curve import Point, curve_lines, value_range
from anymamba.cli.terminal import Terminal, human_bytes, human_count

__all__ = ["LineDisplay", "LiveDisplay", "open_display"]

Entry = Mapping[str, Any]
# Seconds between lines where no terminal is: enough to see life in a log, few enough to read it.
LINE_SECONDS = 10.0
CURVE_HEIGHT = 8
SAMPLE_LINES = 5
# How notes begin that say nothing a person has to know.
ROUTINE = tuple(f"{split}: {what}" for split in ("train", "valid") for what in ("wrote", "reusing"))


def open_display(terminal: Terminal) -> "LiveDisplay | LineDisplay":
    """Return the display that suits where the output goes."""
    if terminal.out.is_terminal and not terminal.as_json:
        return LiveDisplay(terminal)
    return LineDisplay(terminal)


class RunFacts:
    """What the entries of a run have told so far."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self.start: Entry = {}
        self.last: Entry = {}
        self.sample: Entry = {}
        self.losses: list[Point] = []
        self.valid: list[Point] = []
        self.skips: list[str] = []

    def take(self, entry: Entry) -> None:
        """Remember an entry."""
        match entry["kind"]:
            case "start":
                self.start = entry
            case "step":
                self.last = entry
                self.losses.append((entry["step"], entry["bits_per_byte"]))
            case "valid":
                self.valid.append((entry["step"], entry["bits_per_byte"]))
            case "sample":
                self.sample = entry
            case "skip":
                self.skips.append(f"step {entry['step']} skipped: {entry['why']}")

    @property
    def share(self) -> float:
        """How much of the run is done, by steps or by time, whichever ends it first."""
        steps, limit = self.start.get("steps"), self.start.get("seconds_limit")
        shares = [0.0]
        if steps:
            shares.append(self.last.get("step", self.start.get("step", 0)) / steps)
        if limit:
            shares.append(self.last.get("seconds", 0.0) / limit)
        return min(max(shares), 1.0)

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes at the pace of the whole run; None before there is one."""
        if not self.last or not self.share:
            return None
        return self.last["seconds"] * (1 - self.share) / self.share

    def headline(self) -> str:
        """Say what is trained on what."""
        start = self.start
        family = start["layer"].replace("Mamba", "Mamba-")
        return (
            f"{family}, {human_count(start['parameters'])} parameters, on "
            f"{human_bytes(start['train_bytes'])} of text, "
            f"{start['tokens_per_step']:,} tokens a step"
        )

    def numbers(self) -> str:
        """Say how it goes."""
        last = self.last
        left = "" if self.seconds_left is None else f"   {_clock(self.seconds_left)} left"
        return (
            f"{last['bits_per_byte']:.3f} bits/byte   {last['tokens_per_second']:,.0f} tokens/s   "
            f"{last['share_of_ideal']:.0%} of ideal{left}"
        )

    def place(self) -> str:
        """Say which step of how many."""
        step, steps = self.last.get("step", self.start.get("step", 0)), self.start.get("steps")
        return f"step {step:,}" + (f" of {steps:,}" if steps else "")


class LineDisplay:
    """One line when something happens, and now and then one about the loss.

    Args:
        terminal: where to write.
        clock: seconds; replaced in tests.
    """

    def __init__(self, terminal: Terminal, clock: Callable[[], float] = time.monotonic) -> None:
        """Write nothing yet."""
        self._terminal, self._clock = terminal, clock
        self._facts = RunFacts()
        self._next = 0.0

    def __enter__(self) -> "LineDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, entry: Entry) -> None:
        """Take an entry of the metrics; write a line if it is worth one."""
        facts = self._facts
        facts.take(entry)
        match entry["kind"]:
            case "start":
                self._line(facts.headline())
                for note in entry["notes"]:
                    self._line(note)
                if entry["resumed"]:
                    self._line(f"resumed after step {entry['step']:,}")
            case "step" if self._is_time():
                self._line(f"{facts.place()}   {facts.numbers()}")
            case "valid":
                self._line(
                    f"step {entry['step']:,}   held out {entry['bits_per_byte']:.4f} bits/byte"
                )
            case "sample":
                text = " ".join((entry["prompt"] + entry["text"]).split())
                self._line(f"step {entry['step']:,}   sample: {text[:100]}")
            case "skip":
                self._line(facts.skips[-1])
            case "end" if not entry["finished"]:
                self._line(f"stopped after step {entry['step']:,}; go on with --resume")

    def _is_time(self) -> bool:
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + LINE_SECONDS
        return True

    def _line(self, text: str) -> None:
        self._terminal.out.print(text, markup=False, soft_wrap=True)


class LiveDisplay:
    """A picture that is redrawn as the run goes: curve, progress, speed, the latest sample.

    Args:
        terminal: where to draw.
    """

    def __init__(self, terminal: Terminal) -> None:
        """Draw nothing yet."""
        self._terminal = terminal
        self._facts = RunFacts()
        # Redrawn when there is news: a thread that redraws would take time from the training.
        self._live = Live(console=terminal.out, auto_refresh=False)

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, entry: Entry) -> None:
        """Take an entry of the metrics and redraw."""
        self._facts.take(entry)
        if entry["kind"] == "start":
            for note in entry["notes"]:
                # Where the tokens lie is for logs; the headline says how much text there is.
                if not note.startswith(ROUTINE):
                    self._terminal.out.print(f"  {note}", style="dim", markup=False)
            if entry["resumed"]:
                self._terminal.out.print(f"  resumed after step {entry['step']:,}")
        elif entry["kind"] == "skip":
            self._terminal.out.print(f"  {self._facts.skips[-1]}", style="yellow", markup=False)
        self._live.update(self.picture(), refresh=True)

    def picture(self) -> RenderableType:
        """Return the picture of what is known."""
        facts = self._facts
        if not facts.start:
            return Text("  preparing the text ...", style="dim")
        parts: list[RenderableType] = [Text(f"  {facts.headline()}", style="bold"), Text()]
        if facts.losses:
            parts += [self._curve(), Text()]
        parts.append(self._bar())
        if facts.last:
            parts.append(Text(f"  {facts.numbers()}"))
        if facts.sample:
            parts += [Text(), *self._sample()]
        return Group(*parts)

    def _curve(self) -> RenderableType:
        facts = self._facts
        width = max(20, min(self._terminal.out.width - 14, 90))
        low, high = value_range([*facts.losses, *facts.valid])
        right = facts.start.get("steps") or facts.losses[-1][0]
        lines = curve_lines(
            facts.losses,
            facts.valid,
            width=width,
            height=CURVE_HEIGHT,
            right=right,
            low=low,
            high=high,
        )
        picture = Text()
        for number, line in enumerate(lines):
            label = {0: f"{high:.2f}", len(lines) - 1: f"{low:.2f}"}.get(number, "")
            picture.append(f"{label:>8} ┤", style="dim")
            for character, is_mark in line:
                picture.append(character, style="bold red" if is_mark else "cyan")
            picture.append("\n")
        picture.append(f"{'':>9}└{'─' * width}\n", style="dim")
        picture.append(f"{'':>10}bits per byte over steps", style="dim")
        if facts.valid:
            picture.append("   ● held out ", style="bold red")
            picture.append(f"{facts.valid[-1][1]:.3f}", style="bold red")
        return picture

    def _bar(self) -> RenderableType:
        row = Table.grid(padding=(0, 1))
        width = max(10, min(self._terminal.out.width - 34, 60))
        bar = ProgressBar(total=1.0, completed=self._facts.share, width=width)
        row.add_row("", bar, f"{self._facts.share:.0%}", self._facts.place())
        return row

    def _sample(self) -> list[RenderableType]:
        entry = self._facts.sample
        text = entry["prompt"] + entry["text"]
        width = max(20, self._terminal.out.width - 6)
        lines = [line[:width] for line in text.expandtabs(4).splitlines() if line.strip()]
        title = Text(f"  written after step {entry['step']:,}", style="dim")
        shown = [Text(f"  │ {_printable(line)}", style="green") for line in lines[:SAMPLE_LINES]]
        return [title, *shown]


def _printable(text: str) -> str:
    """Replace what could move the cursor of a terminal."""
    return "".join(character if character.isprintable() else "·" for character in text)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
