"""Entry point of `anymamba` and `python -m anymamba`.

Exit codes: 0 all is well, 1 a check failed, 2 a wrong call or an error with a reason, 130 stopped
by Ctrl-C. A reader that has had enough (`anymamba generate ... | head -1`) is no error.
"""

import io
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from anymamba.errors import AnyMambaError

__all__ = ["main"]

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors != "surrogateescape":
        # As in arguments: what is not UTF-8 is refused by whoever reads it, with a reason.
        sys.stdin.reconfigure(errors="surrogateescape")
    try:
        code = _parse_and_run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes stdout once more at exit; let that go nowhere instead of failing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse_and_run(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        from anymamba import __version__

        sys.stdout.write(f"anymamba {__version__}\n")
        return 0
    try:
        from anymamba.cli.commands import parse
        from anymamba.cli.terminal import Terminal
    except ImportError as error:
        sys.stderr.write(f"anymamba: {error}. Install the extra: pip install 'anymamba[cli]'\n")
        return 2
    try:
        name, command = parse(arguments)
    except SystemExit as end:  # --help, completion, or a wrong call that was explained
        return end.code if isinstance(end.code, int) else 2 * (end.code is not None)
    return _run(name, command, Terminal(name, command.json))


def _run(name: str, command: Any, terminal: Any) -> int:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("anymamba: %(message)s"))
    log = logging.getLogger("anymamba")
    log.addHandler(handler)
    try:
        with warnings.catch_warnings():
            # Warnings are for the user too: a sentence, without the line of code behind it.
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = lambda message, *_: log.warning("%s", message)
            return command.run(terminal)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return INTERRUPTED
    except (AnyMambaError, OSError, ImportError) as error:
        sys.stderr.write(f"anymamba {name}: {error}\n")
        terminal.document(ok=False, error={"type": type(error).__name__, "message": str(error)})
        return 2
    finally:
        log.removeHandler(handler)
