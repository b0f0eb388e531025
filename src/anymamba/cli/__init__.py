"""The command line: arguments, terminal, exit codes."""

from anymamba.cli.main import main

__all__ = ["main"]
