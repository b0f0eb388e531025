"""The table of commands, and how a command line becomes one of them."""

from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff, subcommand

from anymamba.cli.bench import Bench
from anymamba.cli.chat import Chat
from anymamba.cli.compare import Compare
from anymamba.cli.convert import Convert
from anymamba.cli.demo import Demo
from anymamba.cli.doctor import Doctor
from anymamba.cli.generate import Generate
from anymamba.cli.inspect import Inspect
from anymamba.cli.train import Train
from anymamba.cli.verify import Verify

__all__ = ["COMMANDS", "parse"]

COMMANDS = {
    "demo": Demo,
    "train": Train,
    "compare": Compare,
    "generate": Generate,
    "chat": Chat,
    "verify": Verify,
    "inspect": Inspect,
    "convert": Convert,
    "doctor": Doctor,
    "bench": Bench,
}
# Spelled out, not built from the table: type checkers cannot follow a union made at run time.
Command = (
    Annotated[Demo, subcommand("demo")]
    | Annotated[Train, subcommand("train")]
    | Annotated[Compare, subcommand("compare")]
    | Annotated[Generate, subcommand("generate")]
    | Annotated[Chat, subcommand("chat")]
    | Annotated[Verify, subcommand("verify")]
    | Annotated[Inspect, subcommand("inspect")]
    | Annotated[Convert, subcommand("convert")]
    | Annotated[Doctor, subcommand("doctor")]
    | Annotated[Bench, subcommand("bench")]
)


def parse(arguments: Sequence[str]) -> tuple[str, Any]:
    """Return the command's name and its typed arguments; exits on --help and on a wrong call."""
    command: Any = tyro.cli(
        Command,  # pyright: ignore[reportArgumentType]
        prog="anymamba",
        description="Mamba-1, Mamba-2 and Mamba-3 on any device.",
        args=list(arguments),
        config=(FlagCreatePairsOff,),
    )
    return next(name for name, kind in COMMANDS.items() if type(command) is kind), command
