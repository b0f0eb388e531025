"""The command line: arguments, terminal, exit codes; and text as it appears there."""

from anymamba.cli.main import main
from anymamba.cli.speech import Speech, StopText, first_ids, speak

__all__ = ["Speech", "StopText", "first_ids", "main", "speak"]
