"""`anymamba demo`: a model is trained before your eyes, checked, used, and put to a test."""

import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from tyro.conf import UseAppendAction, arg

from anymamba.cli.compare import comparison_table, comparison_verdict
from anymamba.cli.terminal import Terminal
from anymamba.cli.train import run_facts, train_with_display
from anymamba.cli.verify import verdict, verify_table
from anymamba.errors import ConfigError

if TYPE_CHECKING:
    from anymamba.models import MambaLM
    from anymamba.train import Recipe, RunFolder

__all__ = ["Demo"]

PROMPT = "def __init__(self, "
NEW_TOKENS = 200
# A folder with this file was made by a demo, so the next demo may replace it.
MARK = ".made-by-anymamba-demo"
# Small enough to learn in two minutes on two cores: see docs/training.md.
RECIPE = (
    "data.mode=packed",
    "data.window=512",
    "data.batch=4",
    "data.valid_share=0.02",
    "model.d_model=192",
    "model.n_layer=2",
    "model.d_intermediate=384",
    "model.ssm_cfg.d_state=32",
    "model.ssm_cfg.headdim=64",
    "optim.name=muon",
    "optim.lr=4e-3",
    "optim.muon_lr=1e-2",
    "schedule.warmup=30",
    "loop.evaluate_tokens=16384",
    "loop.sample_prompt=def ",
    "loop.sample_tokens=96",
)
# Looks at the loss, the held-out text and the writing on the way.
REPORTS, LOOKS = 120, 6


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a small Mamba-3 on Python's own sources, verify it, let it write, and measure it."""

    seconds: float = 100.0
    """Time of training; the whole demo takes about a minute more."""

    out: Annotated[str, arg(metavar="FOLDER")] = "demo-run"
    """Where the model, its curves and the report are left; an older demo there is replaced."""

    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="A.B=C")] = ()
    """Change a field of the demo's recipe, as in anymamba train."""

    tour: bool = False
    """Afterwards run every operator in every way there is, and say what each costs."""

    json: bool = False
    """Write JSON to stdout instead of text."""

    def run(self, terminal: Terminal) -> int:
        """Show everything; exit code 1 if anything that must be equal is not."""
        import torch

        from anymamba import __version__
        from anymamba.io import load_pretrained
        from anymamba.train import RunFolder, compare_run

        out, folder = terminal.out, RunFolder(self.out)
        threads = torch.get_num_threads()
        out.print(
            f"\n[bold]anymamba[/] {__version__}   torch {torch.__version__}, "
            f"{threads} thread{'s' if threads > 1 else ''}, no GPU and no compiler needed\n"
        )
        _make_room(folder)
        out.rule("1. training: a Mamba-3 reads Python's own sources", align="left")
        out.print()
        summary = train_with_display(terminal, self._recipe(terminal))
        if not summary.finished:
            out.print(f"\n  Stopped after step {summary.step:,}.\n")
            return 130
        lm = load_pretrained(folder.model)
        out.print()
        out.rule("2. verified: every way of running it gives the same", align="left")
        report = _verified(terminal, lm)
        out.rule("3. writing: from a prompt, and from a state file", align="left")
        text, is_same = _generated(terminal, lm, folder)
        out.rule("4. a test: held-out files, beside counting the same bytes", align="left")
        out.print()
        with terminal.err.status("counting, and reading the held-out files ..."):
            found = compare_run(folder)
        out.print(comparison_table(found))
        out.print(comparison_verdict(found))
        if not found.model_wins:
            out.print("  More time helps: anymamba demo --seconds 170\n")
        _farewell(terminal, folder)
        ok, facts = report.ok and is_same, {}
        if self.tour:
            ok, facts = self._toured(terminal, ok)
        terminal.document(
            ok=ok,
            training=run_facts(summary),
            verify=report.to_dict(),
            text=text,
            resumed_equals_whole=is_same,
            comparison=found._asdict(),
            tour=facts or None,
        )
        return 0 if ok else 1

    def _recipe(self, terminal: Terminal) -> "Recipe":
        """Return the recipe, with as many steps as this machine takes in the time."""
        from anymamba.train import load_recipe, steps_within

        if not self.seconds > 0:
            raise ConfigError(f"demo: --seconds must be positive; got {self.seconds}.")
        # The schedule needs a last step; which one it is, the machine has to say.
        recipe = load_recipe(None, [*RECIPE, f"loop.out={self.out}", *self.set])
        with terminal.err.status("reading the text, and timing a few steps ..."):
            steps = steps_within(recipe, self.seconds)
        loop = replace(
            recipe.loop,
            steps=steps,
            # Should the machine become busy: better a run that ends early than one that drags on.
            seconds=1.25 * self.seconds,
            report_every=max(1, steps // REPORTS),
            evaluate_every=max(1, steps // LOOKS),
            sample_every=max(1, steps // LOOKS),
            checkpoint_every=max(1, steps // 2),
        )
        warmup = min(recipe.schedule.warmup, steps // 4)
        return replace(recipe, loop=loop, schedule=replace(recipe.schedule, warmup=warmup))

    def _toured(self, terminal: Terminal, ok: bool) -> tuple[bool, dict[str, Any]]:
        from anymamba.cli.tour import show_tour

        terminal.out.rule("5. the engine room: every scan, every way", align="left")
        terminal.out.print()
        tour = show_tour(terminal, length=97, size=512, repeats=1)
        return ok and tour.ok, {
            "operators": tour.errors,
            "core": [figure._asdict() for figure in tour.core],
            "scan": [figure._asdict() for figure in tour.scan],
        }


def _make_room(folder: "RunFolder") -> None:
    """Remove an older demo, and nothing that a demo did not make."""
    place = folder.folder
    if place.exists():
        if not (place / MARK).is_file():
            raise ConfigError(
                f"demo: {str(place)!r} must be free, or hold an older demo; it holds something "
                "else. Choose another place with --out."
            )
        shutil.rmtree(place)
    place.mkdir(parents=True)
    (place / MARK).touch()


def _verified(terminal: Terminal, lm: "MambaLM") -> Any:
    from anymamba.models import verify

    with terminal.err.status("running the model every way ..."):
        report = verify(lm)
    terminal.out.print()
    terminal.out.print(verify_table(report, "the model"))
    terminal.out.print(verdict(report) + "\n")
    return report


def _generated(terminal: Terminal, lm: "MambaLM", folder: "RunFolder") -> tuple[str, bool]:
    """Continue a prompt, then again from a state file written in the middle of the prompt."""
    from anymamba.cli.speech import speak
    from anymamba.generate import stream
    from anymamba.io import ByteTokenizer, load_state, save_state

    tokenizer, file = ByteTokenizer(), folder.folder / "half.state"
    ids = tokenizer.encode(PROMPT)
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "temperature": 0.7, "top_p": 0.95}
    terminal.out.print()
    terminal.text(PROMPT)
    # A young model may write half a character; a terminal must survive that.
    speech = speak(lm, tokenizer, ids, lambda text: terminal.text(_printable(text)), **options)
    half = len(ids) // 2
    save_state(stream(lm, ids[:half], max_new_tokens=0).cache, file)
    stop_ids = [tokenizer.eos_id]  # as `speak` does
    again = stream(lm, ids[half:], cache=load_state(file), stop_ids=stop_ids, **options)
    is_same = list(again) == speech.ids
    same = "[green]the same text[/]" if is_same else "[bold red]another text[/]"
    speed = speech.tokens_per_second
    terminal.out.print(
        "\n\n"
        + ("" if speed is None else f"  {speed:.0f} tokens/s.\n")
        + f"  From a state file written in the middle of the prompt: {same}.\n"
    )
    return speech.text, is_same


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)


def _farewell(terminal: Terminal, folder: "RunFolder") -> None:
    """Say what was left, and what to try next."""
    model = escape(str(folder.model))
    terminal.out.print(
        f"  Curves: [bold]{escape(str(folder.picture))}[/]   "
        f"on a page: [bold]{escape(str(folder.report))}[/]\n\n"
        f"  Go on:\n"
        f"    anymamba generate {model} --prompt 'import ' --temperature 0.7\n"
        f"    anymamba compare {escape(str(folder.folder))}\n"
        f"    anymamba train --set data.train=FOLDER --set loop.out=my-run\n"
    )
