"""Entry point of `anymamba` and `python -m anymamba`."""

import argparse
import sys
from collections.abc import Sequence

from anymamba.errors import AnyMambaError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = argparse.ArgumentParser(prog="anymamba", description="Mamba-1, 2 and 3 on any device.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser("demo", help="a tour: every scan, every way, what each costs")
    demo.add_argument("--length", type=int, default=97, help="tokens in the equality table")
    demo.add_argument("--size", type=int, default=1024, help="tokens in the cost tables")
    demo.add_argument("--repeats", type=int, default=3, help="runs per median")
    arguments = parser.parse_args(argv)
    try:
        from rich.console import Console

        from anymamba.cli.demo import run_demo
    except ImportError as error:
        sys.stderr.write(
            f"anymamba demo: {error}. Install the extra: pip install 'anymamba[cli]'.\n"
        )
        return 2
    try:
        return run_demo(
            Console(), length=arguments.length, size=arguments.size, repeats=arguments.repeats
        )
    except AnyMambaError as error:
        sys.stderr.write(f"anymamba demo: {error}\n")
        return 2
