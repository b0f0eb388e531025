"""`anymamba inspect MODEL`: what it is made of, what it costs, where the time goes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from rich.table import Table
from tyro.conf import arg

from anymamba.cli.any_model import AnyModelOptions
from anymamba.cli.part_cases import part_cases
from anymamba.cli.terminal import Terminal, human_bytes, human_count, new_table
from anymamba.errors import ConfigError

if TYPE_CHECKING:
    from anymamba.models import ActivationReport, ModelCount

__all__ = ["Inspect"]


@dataclass(frozen=True, kw_only=True)
class Inspect(AnyModelOptions):
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

        if self.repeats < 1:
            raise ConfigError(
                f"inspect: --repeats must be at least 1; got {self.repeats}. "
                "Use --length 0 to time nothing."
            )
        model: Any = self.load_any()
        count = count_model(model)
        seconds: dict[str, float] = {}
        if self.length > 0:
            with terminal.err.status("timing a prefill ..."):
                seconds = _seconds(model, count, self.length, self.repeats)
        terminal.out.print(_summary(self.model, model, count))
        terminal.out.print(_table(count, seconds, self.length))
        activation = None
        if self.text is not None:
            with terminal.err.status("reading the text under each activation ..."):
                activation = self._activation(model, self.text)
            terminal.out.print(_activation_text(activation))
        terminal.document(
            ok=True,
            model=self.model,
            config=model.config.to_dict(),
            count=count.to_dict(),
            seconds=seconds,
            timed_tokens=self.length,
            activation=None if activation is None else activation._asdict(),
        )
        return 0

    def _activation(self, model: Any, file: Path) -> "ActivationReport":
        import torch

        from anymamba.io import read_text
        from anymamba.models import MambaLM, compare_activations

        if not isinstance(model, MambaLM):
            raise ConfigError(
                "inspect: --text compares perplexities, so the model must be a language model; "
                f"{self.model} holds a {type(model).__name__}. Leave --text out."
            )
        tokenizer = self.load_tokenizer(self.tokenizer, model)
        ids = tokenizer.encode(read_text("inspect", file))[: self.text_tokens]
        device = model.backbone.embedding.weight.device
        return compare_activations(model, torch.tensor([ids], dtype=torch.int64, device=device))


def _seconds(model: Any, count: "ModelCount", length: int, repeats: int) -> dict[str, float]:
    """Return the seconds of a prefill by kind of part: one is timed, and counts for all."""
    import torch

    from anymamba.bench import interleaved_medians

    with torch.inference_mode():
        medians = interleaved_medians(part_cases(model, count, length), repeats=repeats)
    return {kind: total.passes * medians[kind] for kind, (_, total) in count.by_kind().items()}


def _summary(name: str, model: Any, count: "ModelCount") -> str:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    what, ends, options = _described(model)
    has_attention = any(part.kind == "MHA" for part in count.parts)
    state = f"{human_bytes(count.state_bytes)} per sequence"
    state += " and grows" if has_attention else ", whatever the length"
    lines = [
        f"\n[bold]{escape(name)}[/]: {what}, {dtype}",
        f"  {ends[0]:<12} {ends[1]}",
        f"  parameters   {count.parameters:,} in {human_bytes(count.bytes)}",
        f"  state        {state if count.state_bytes else 'none: it reads from both ends'}",
        f"  one token    {human_count(count.flops, 'FLOP')}",
    ]
    if options:
        lines.append(f"  options      {escape(options)}")
    return "\n".join(lines) + "\n"


def _described(model: Any) -> tuple[str, tuple[str, str], str]:
    """Return what a model is, what goes in and out, and the options of its mixers."""
    from anymamba.models import LatentModel, MambaLM

    config = model.config
    if isinstance(model, MambaLM):
        vocabulary = f"{config.vocab_size} tokens"
        if config.padded_vocab_size != config.vocab_size:
            vocabulary += f" (padded to {config.padded_vocab_size})"
        vocabulary += ", tied head" if config.tie_embeddings else ""
        what = f"{config.layer}, {_layers(config.stack)}"
        return what, ("vocabulary", vocabulary), _options(config.mixer_options)
    kinds = ", ".join(dict.fromkeys(spec.kind for spec in config.stack.specs))
    what = f"{type(model).__name__} of {kinds}, {_layers(config.stack)}"
    options = _options({k: v for k, v in config.stack.ssm_cfg.items() if k != "layer"})
    if isinstance(model, LatentModel):
        ends = f"{config.d_input} numbers in, {config.d_output} out at {config.readout}"
        return what, ("task", f"{config.task}, {ends}"), options
    classes = "" if config.n_classes is None else f", {config.n_classes} classes"
    return what, ("head", f"{config.head}{classes}, {config.vocab_size} tokens"), options


def _layers(stack: Any) -> str:
    virtual = "" if stack.virtual is None else f", run as {len(stack.schedule)}"
    return f"{len(stack.specs)} layers of {stack.d_model}{virtual}"


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items())


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
