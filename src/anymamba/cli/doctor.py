"""`anymamba doctor`: what is installed, what it runs on, and which code serves each operator."""

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from anymamba.cli.terminal import Terminal, new_table

if TYPE_CHECKING:  # torch is imported when a command runs, not for its help
    from anymamba.ops import NativeStatus

__all__ = ["Doctor"]

# package: (extra that brings it, what it is for)
PACKAGES = {
    "torch": ("", "everything"),
    "rich": ("cli", "the command line"),
    "tyro": ("cli", "the command line"),
    "safetensors": ("io", "weights and states in files"),
    "numpy": ("io", "needed by safetensors"),
    "tokenizers": ("io", "tokenizer.json files"),
    "huggingface_hub": ("io", "models by name"),
}
# The scans of the tour, and the operator behind each.
OPERATORS = {"Mamba-1": "selective_scan", "Mamba-2": "ssd", "Mamba-3": "trapezoid_scan"}
IMPLEMENTATIONS = ("native", "portable", "reference")
# The same as the tour's: float32 rounding through a short scan.
LIMIT = 2e-4


class Served(NamedTuple):
    """An operator: what `impl="auto"` takes, why not the others, how far it is from the judge."""

    operator: str
    family: str
    auto: str
    refused: dict[str, str]
    error: float

    @property
    def ok(self) -> bool:
        """Whether the operator runs and agrees with its reference."""
        return self.error <= LIMIT


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say what is installed, which devices there are, and which code serves each operator."""

    json: bool = False
    """Write JSON to stdout instead of text."""

    def run(self, terminal: Terminal) -> int:
        """Examine and print; exit code 1 if an operator is wrong."""
        from anymamba.ops import native_status

        with terminal.err.status("running every operator ..."):
            versions, devices, served = _versions(), _devices(), _operators()
            kernels = native_status()
        ok = all(row.ok for row in served)
        terminal.out.print(_version_table(versions))
        terminal.out.print(_device_table(devices))
        terminal.out.print(_operator_table(served))
        terminal.out.print(f"  {escape(_about(kernels))}")
        reasons = {
            f"{name}: {why.removeprefix(f'impl={name!r} ')}"
            for row in served
            for name, why in row.refused.items()
        }
        for reason in sorted(reasons):
            terminal.out.print(f"  [dim]{escape(reason)}[/]")
        verdict = "[green]All is well.[/]" if ok else "[bold red]An operator is wrong.[/]"
        terminal.out.print(f"  {verdict}\n")
        terminal.document(
            ok=ok,
            versions=versions,
            devices=devices,
            kernels=kernels._asdict(),
            operators=[{**row._asdict(), "ok": row.ok} for row in served],
        )
        return 0 if ok else 1


def _versions() -> dict[str, str | None]:
    from anymamba import __version__

    found: dict[str, str | None] = {"anymamba": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _devices() -> list[dict[str, Any]]:
    """Return each kind of device: how many there are, and what is to be said about it."""
    import torch

    threads = f"{torch.get_num_threads()} threads, {os.cpu_count()} processors"
    capability = torch.backends.cpu.get_cpu_capability()
    found: list[dict[str, Any]] = [
        {"device": "cpu", "count": 1, "note": f"{platform.machine()}, {capability}, {threads}"}
    ]
    # The oldest supported torch does not have all of these modules.
    for kind in ("cuda", "mps", "xpu"):
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            built = kind == "cuda" and torch.version.cuda is None and torch.version.hip is None
            why = "this torch was built without it" if built else "no such device here"
            found.append({"device": kind, "count": 0, "note": why})
            continue
        names = [
            getattr(module, "get_device_name", str)(place) for place in range(module.device_count())
        ]
        found.append({"device": kind, "count": len(names), "note": ", ".join(names)})
    return found


def _operators() -> list[Served]:
    """Run each operator in each implementation on a few tokens."""
    from anymamba.cli.laws import distance
    from anymamba.cli.scans import all_scans
    from anymamba.errors import BackendError

    served = []
    for scan in all_scans(5):
        if scan.name not in OPERATORS:
            continue
        refused: dict[str, str] = {}
        for impl in IMPLEMENTATIONS:
            try:
                scan.run(scan.tokens, scan.state, impl=impl)
            except BackendError as error:
                refused[impl] = str(error).partition(": ")[2].partition(". ")[0]
        auto = next(impl for impl in IMPLEMENTATIONS if impl not in refused)
        error = distance(scan, impl="auto")
        served.append(Served(OPERATORS[scan.name], scan.name, auto, refused, error))
    return served


def _about(kernels: "NativeStatus") -> str:
    """Say in one sentence what the compiled CPU kernels are here."""
    if kernels.why_not is not None:
        return f"CPU kernels: none; {kernels.why_not}. The portable code serves."
    built = ", ".join(kernels.available)
    return f"CPU kernels: {kernels.variant} (this machine runs {built}), on {kernels.threading}."


def _version_table(versions: dict[str, str | None]) -> Table:
    table = new_table("Versions")
    for column in ("package", "version", "for"):
        table.add_column(column)
    for name, version in versions.items():
        extra, use = PACKAGES.get(name, ("", ""))
        missing = f"[yellow]not installed[/]: pip install 'anymamba\\[{extra}]'"
        table.add_row(name, version or missing, f"[dim]{use}[/]")
    return table


def _device_table(devices: list[dict[str, Any]]) -> Table:
    table = new_table("Devices")
    table.add_column("device")
    table.add_column("count", justify="right")
    table.add_column("")
    for row in devices:
        style = None if row["count"] else "dim"
        table.add_row(row["device"], str(row["count"]), escape(row["note"]), style=style)
    return table


def _operator_table(served: list[Served]) -> Table:
    table = new_table("Operators: which implementation serves impl='auto' on the CPU")
    for column in ("operator", "family", "auto", "also", "refused"):
        table.add_column(column)
    table.add_column("error", justify="right")
    for row in served:
        others = [x for x in IMPLEMENTATIONS if x not in row.refused and x != row.auto]
        table.add_row(
            row.operator,
            row.family,
            row.auto,
            ", ".join(others),
            ", ".join(row.refused),
            f"{row.error:.0e}",
            style=None if row.ok else "bold red",
        )
    return table
