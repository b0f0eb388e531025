"""`anymamba inspect MODEL`: what it is made of, what it costs, where the time goes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from rich.table import Table
from tyro.conf import arg

from anymamba.cli.options import ModelOptions
from anymamba.cli.terminal import Terminal, human_bytes, human_count, new_table

if TYPE_CHECKING:
    from anymamba.models import ActivationReport, MambaLM, ModelCount

__all__ = ["Inspect"]


@dataclass(frozen=True, kw_only=True)
class Inspect(ModelOptions):
    """List layers, parameters, bytes, state and FLOP of a model, and where the time goes."""

    text: Annotated[Path | None, arg(metavar="FILE")] = None
    """Mamba-3: a text whose perplexity tells which activation of A the weights want."""

    tokenizer: Annotated[str | None, arg(metavar="FILE")] = None
    """For --text: a tokenizer.json, a name on the hub, or bytes."""

    text_tokens: int = 2048
    """Read this many tokens of the text."""

    length: int = 512
    """Tokens of the timed prefill; 0 times nothing."""

    repeats: int = 3
    """Runs per median."""

    def run(self, terminal: Terminal) -> int:
        """Count, time and print."""
        from anymamba.models import count_model

        lm = self.load()
        count = count_model(lm)
        seconds: dict[str, float] = {}
        if self.length > 0:
            with terminal.err.status("timing a prefill ..."):
                seconds = _seconds(lm, count, self.length, self.repeats)
        terminal.out.print(_summary(self.model, lm, count))
        terminal.out.print(_table(count, seconds, self.length))
        activation = None
        if self.text is not None:
            with terminal.err.status("reading the text under each activation ..."):
                activation = self._activation(lm, self.text)
            terminal.out.print(_activation_text(activation))
        terminal.document(
            ok=True,
            model=self.model,
            config=lm.config.to_dict(),
            count=count.to_dict(),
            seconds=seconds,
            timed_tokens=self.length,
            activation=None if activation is None else activation._asdict(),
        )
        return 0

    def _activation(self, lm: "MambaLM", file: Path) -> "ActivationReport":
        import torch

        from anymamba.models import compare_activations

        tokenizer = self.load_tokenizer(self.tokenizer, lm)
        ids = tokenizer.encode(file.read_text(encoding="utf-8"))[: self.text_tokens]
        return compare_activations(lm, torch.tensor([ids], dtype=torch.int64, device=_device(lm)))


def _device(lm: "MambaLM") -> Any:
    return lm.backbone.embedding.weight.device


def _seconds(lm: "MambaLM", count: "ModelCount", length: int, repeats: int) -> dict[str, float]:
    """Return the seconds of a prefill by kind of part: one is timed, and counts for all."""
    import torch

    from anymamba.bench import interleaved_medians
    from anymamba.nn import add_norm

    ids_bs = torch.zeros(1, length, dtype=torch.int64, device=_device(lm))
    in_fp32 = lm.config.residual_in_fp32
    layers: list[Any] = list(lm.backbone.layers)
    with torch.inference_mode():
        x_bsd = lm.backbone.embedding(ids_bs)
        cases: dict[str, Callable[[], object]] = {
            "embedding": lambda: lm.backbone.embedding(ids_bs),
            "norm": lambda: add_norm(lm.backbone.norm_f, x_bsd, x_bsd, in_fp32),
        }
        for layer in layers:
            mixer = layer.mixer
            cases.setdefault(type(mixer).__name__, lambda mixer=mixer: mixer.prefill(x_bsd))
            if layer.has_mlp:
                cases.setdefault(type(layer.mlp).__name__, lambda mlp=layer.mlp: mlp(x_bsd))
        cases["head"] = lambda: lm.lm_head(x_bsd)
        medians = interleaved_medians(cases, repeats=repeats)
    return {kind: number * medians[kind] for kind, (number, _) in count.by_kind().items()}


def _summary(name: str, lm: "MambaLM", count: "ModelCount") -> str:
    config = lm.config
    dtype = str(lm.backbone.embedding.weight.dtype).removeprefix("torch.")
    vocabulary = f"{config.vocab_size} tokens"
    if config.padded_vocab_size != config.vocab_size:
        vocabulary += f" (padded to {config.padded_vocab_size})"
    grows = " and grows" if config.attn_layer_idx else ", whatever the length"
    options = ", ".join(f"{key}={value}" for key, value in config.mixer_options.items())
    size = f"{config.n_layer} layers of {config.d_model}"
    lines = [
        f"\n[bold]{escape(name)}[/]: {config.layer}, {size}, {dtype}",
        f"  vocabulary   {vocabulary}{', tied head' if config.tie_embeddings else ''}",
        f"  parameters   {count.parameters:,} in {human_bytes(count.bytes)}",
        f"  state        {human_bytes(count.state_bytes)} per sequence{grows}",
        f"  one token    {human_count(count.flops, 'FLOP')}",
    ]
    if options:
        lines.append(f"  options      {escape(options)}")
    return "\n".join(lines) + "\n"


def _table(count: "ModelCount", seconds: dict[str, float], length: int) -> Table:
    title = f"Parts, and a prefill of {length} tokens" if seconds else "Parts"
    table = new_table(title)
    table.add_column("kind")
    columns = ["number", "parameters", "bytes", "state", "FLOP/token"]
    for column in columns + (["time", "share"] if seconds else []):
        table.add_column(column, justify="right")
    whole = sum(seconds.values())
    for kind, (many, part) in count.by_kind().items():
        row = [kind, str(many), human_count(part.parameters), human_bytes(part.bytes)]
        row += [human_bytes(part.state_bytes) if part.state_bytes else "-"]
        row += [human_count(part.flops) if part.flops else "-"]
        if seconds:
            spent = seconds[kind]
            row += [f"{1e3 * spent:.1f} ms", f"{100 * spent / whole:.0f} %"]
        table.add_row(*row)
    return table


def _activation_text(report: "ActivationReport") -> str:
    lines = ["[bold]Activation of A[/]: perplexity of the text"]
    for name, perplexity in report.perplexity.items():
        mark = "  [green]<- fits[/]" if report.is_decisive and name == report.best else ""
        loaded = "  (as loaded)" if name == report.configured else ""
        lines.append(f"  {name:<12} {perplexity:10.4g}{loaded}{mark}")
    if not report.is_decisive:
        lines.append(
            "  Too close to call: the weights are hardly trained, or the text is too short."
        )
    elif report.best != report.configured:
        lines.append(f"  [yellow]Load it with --a-activation {report.best}.[/]")
    return "\n".join(lines) + "\n"
