"""Which implementation serves a call: a pure function of what was asked and what is there."""

import logging

import torch

from anymamba.errors import BackendError
from anymamba.ops.checks import check_impl

__all__ = ["select_impl"]

_log = logging.getLogger("anymamba.ops")
_log.addHandler(logging.NullHandler())
_told: set[str] = set()


def select_impl(where: str, impl: str, path: object | None = None) -> str:
    """Return the implementation that runs: "portable" or "reference".

    Args:
        where: the operator; opens the messages.
        impl: "auto", "portable", "native" or "reference".
        path: the algorithm that was asked for, if any; only "auto" and "portable" have several.

    Raises:
        ConfigError: `impl` is not a known name.
        BackendError: an explicit `impl` cannot be obeyed.
    """
    check_impl(where, impl)
    if impl == "native":
        raise BackendError(
            f"{where}: impl='native' needs a compiled kernel, and this version has none for it. "
            "Use impl='auto' or impl='portable'."
        )
    if impl == "reference":
        if path is not None:
            raise BackendError(
                f"{where}: impl='reference' is one loop over time and has no path; got {path}. "
                "Leave path out, or use impl='portable'."
            )
        return "reference"
    # A traced function can neither log nor change a global set.
    if impl == "auto" and not torch.compiler.is_compiling() and where not in _told:
        _told.add(where)
        _log.info("%s: portable implementation (no native kernel is built)", where)
    return "portable"
