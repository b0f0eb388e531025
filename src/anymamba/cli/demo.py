"""`anymamba demo`: a checkpoint made, checked and used, and a tour through the engine room."""

import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anymamba.cli.terminal import Terminal, human_bytes, human_count
from anymamba.cli.verify import verdict, verify_table
from anymamba.errors import ConfigError

if TYPE_CHECKING:
    from anymamba.models import MambaLM

__all__ = ["Demo"]

PROMPT = "State is a value: "
NEW_TOKENS = 48


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Build a small Mamba-3 checkpoint, verify it, generate from it, then tour the operators."""

    length: int = 97
    """Tokens in the equality table of the operators."""

    size: int = 512
    """Tokens in the cost tables."""

    repeats: int = 1
    """Runs per median in the cost tables."""

    json: bool = False
    """Write JSON to stdout instead of text."""

    def run(self, terminal: Terminal) -> int:
        """Show everything; exit code 1 if anything that must be equal is not."""
        import torch

        from anymamba import __version__
        from anymamba.cli.tour import show_tour

        if self.length < 3 or self.size < 2 or self.repeats < 1:
            raise ConfigError(
                f"--length must be at least 3, --size 2 and --repeats 1; got {self.length}, "
                f"{self.size} and {self.repeats}."
            )
        out = terminal.out
        threads = torch.get_num_threads()
        out.print(
            f"\n[bold]anymamba[/] {__version__}   torch {torch.__version__}, "
            f"{threads} thread{'s' if threads > 1 else ''}, no GPU and no compiler needed\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            out.rule("1. a checkpoint: made, saved, loaded", align="left")
            lm = _checkpoint(terminal, folder)
            out.rule("2. verified: every way of running it", align="left")
            report = _verified(terminal, lm)
            out.rule("3. generation: streaming, and from a state", align="left")
            text, is_same = _generated(terminal, lm, folder)
        out.rule("4. the engine room: every scan, every way", align="left")
        out.print()
        tour = show_tour(terminal, length=self.length, size=self.size, repeats=self.repeats)
        ok = report.ok and is_same and tour.ok
        terminal.document(
            ok=ok,
            verify=report.to_dict(),
            text=text,
            resumed_equals_whole=is_same,
            operators=tour.errors,
            core=[figure._asdict() for figure in tour.core],
            scan=[figure._asdict() for figure in tour.scan],
        )
        return 0 if ok else 1


def _checkpoint(terminal: Terminal, folder: str) -> "MambaLM":
    """Make a model from a fixed seed, save it and return what was loaded."""
    import torch

    from anymamba.io import ByteTokenizer, load_pretrained, save_pretrained
    from anymamba.models import MambaConfig, MambaLM, count_model

    config = MambaConfig(
        d_model=64,
        d_intermediate=128,
        n_layer=2,
        vocab_size=ByteTokenizer.vocab_size,
        ssm_cfg={"layer": "Mamba3", "d_state": 32, "headdim": 32},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_pretrained(MambaLM(config), folder)
    lm = load_pretrained(folder)
    count = count_model(lm)
    terminal.out.print(
        f"\n  Mamba-3, {config.n_layer} layers, {human_count(count.parameters)} random parameters, "
        f"{human_bytes(count.bytes)}; bytes are its tokens.\n"
        f"  Its whole memory of a text: {human_bytes(count.state_bytes)}, however long the text.\n"
    )
    return lm


def _verified(terminal: Terminal, lm: "MambaLM") -> Any:
    from anymamba.models import verify

    with terminal.err.status("running the model every way ..."):
        report = verify(lm)
    terminal.out.print()
    terminal.out.print(verify_table(report, "the model"))
    terminal.out.print(verdict(report) + "\n")
    return report


def _generated(terminal: Terminal, lm: "MambaLM", folder: str) -> tuple[str, bool]:
    """Continue a prompt, then again from a state file written in the middle of the prompt."""
    from anymamba.cli.speech import speak
    from anymamba.generate import stream
    from anymamba.io import ByteTokenizer, load_state, save_state

    tokenizer, file = ByteTokenizer(), f"{folder}/half.state"
    ids = tokenizer.encode(PROMPT)
    options: dict[str, Any] = {
        "max_new_tokens": NEW_TOKENS,
        "temperature": 1.0,
        "processors": [_printable],
    }
    terminal.out.print()
    terminal.text(f"  {PROMPT}")
    speech = speak(lm, tokenizer, ids, terminal.text, **options)
    half = len(ids) // 2
    save_state(stream(lm, ids[:half], max_new_tokens=0).cache, file)
    again = list(stream(lm, ids[half:], cache=load_state(file), **options))
    is_same = again == speech.ids
    same = "[green]the same text[/]" if is_same else "[bold red]another text[/]"
    terminal.out.print(
        f"\n\n  {speech.tokens_per_second:.0f} tokens/s. Random weights write noise, but always "
        f"the same noise.\n  From a state file written in the middle of the prompt: {same}.\n"
    )
    return speech.text, is_same


def _printable(_: list[int], logits_w: Any) -> Any:
    """Keep the letters of ASCII, so that noise cannot upset a terminal."""
    import torch

    place_w = torch.arange(logits_w.shape[0], device=logits_w.device)
    return logits_w.masked_fill((place_w < ord(" ")) | (place_w > ord("~")), -torch.inf)
