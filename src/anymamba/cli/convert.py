"""`anymamba convert IN OUT`: layouts, formats and dtypes of checkpoints, both ways."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.markup import escape
from tyro.conf import Positional, arg

from anymamba.cli.options import DType, torch_dtype
from anymamba.cli.terminal import Terminal, human_bytes, new_table

__all__ = ["Convert"]


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Rewrite a checkpoint in another layout, format or dtype."""

    source: Annotated[Positional[str], arg(metavar="IN")]
    """A directory, or a name on the hub."""

    target: Annotated[Positional[str], arg(metavar="OUT")]
    """Another directory; created if missing."""

    layout: Literal["official", "transformers"] = "official"
    """Names of tensors and config keys."""

    format: Literal["safetensors", "bin"] = "safetensors"
    """Kind of file; mamba_ssm reads bin only."""

    dtype: Annotated[DType | None, arg(metavar="DTYPE")] = None
    """Store in this dtype; as it is if left out. Not for a model that is quantised."""

    quantize: Annotated[Literal["int8", "int4"] | None, arg(metavar="NAME")] = None
    """Store projections, embedding and head as int8 or int4."""

    a_activation: Annotated[Literal["heavy_tail", "softplus"] | None, arg(metavar="NAME")] = None
    """Mamba-3: heavy_tail or softplus, where IN does not say."""

    revision: Annotated[str | None, arg(metavar="NAME")] = None
    """Branch, tag or commit on the hub."""

    json: bool = False
    """Write JSON to stdout instead of text."""

    def run(self, terminal: Terminal) -> int:
        """Convert and list what was written."""
        from anymamba.io import convert_checkpoint, stored_scheme

        with terminal.err.status("converting ..."):
            convert_checkpoint(
                self.source,
                self.target,
                layout=self.layout,
                format=self.format,
                dtype=torch_dtype(self.dtype),
                a_activation=self.a_activation,
                quantize=self.quantize,
                revision=self.revision,
            )
        files = {
            path.name: path.stat().st_size
            for path in sorted(Path(self.target).iterdir())
            if path.is_file()
        }
        # Asked of the files: those of IN may have been integers already.
        scheme = stored_scheme("convert", Path(self.target))
        head = f"[bold]{escape(self.target)}[/]: layout {self.layout}, format {self.format}"
        head += "" if scheme is None else f", quantised as {scheme}"
        terminal.out.print(f"\n{head}\n")
        table = new_table("Files")
        table.add_column("file")
        table.add_column("size", justify="right")
        for name, size in files.items():
            table.add_row(escape(name), human_bytes(size))
        terminal.out.print(table)
        terminal.document(
            ok=True,
            source=self.source,
            target=self.target,
            layout=self.layout,
            format=self.format,
            quantize=scheme,
            files=[{"name": name, "bytes": size} for name, size in files.items()],
        )
        return 0
