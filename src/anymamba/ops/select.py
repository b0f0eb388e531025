"""Which implementation serves a call: a pure function of what was asked and what is there."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anymamba.errors import BackendError
from anymamba.ops.boundary import Operator
from anymamba.ops.checks import check_impl

if TYPE_CHECKING:  # the path's room enters this one
    from anymamba.ops.ssd.path import SsdPath

__all__ = ["select_impl"]

_log = logging.getLogger("anymamba.ops")
_log.addHandler(logging.NullHandler())
_told: set[tuple[str, str]] = set()


def select_impl(
    where: str,
    impl: str,
    operator: Operator,
    tensors: Sequence[Tensor],
    path: "SsdPath | None" = None,
) -> str:
    """Return who computes: "portable", "reference", or the CPU kernel as "native" or "auto".

    Both of the last run the kernel; "auto" keeps second derivatives, which "native" refuses.

    Args:
        where: the operator; opens the messages.
        impl: "auto", "portable", "native" or "reference".
        operator: knows its kernel.
        tensors: what the operator will be called with.
        path: the algorithm that was asked for, if any; only "auto" and "portable" have several.

    Raises:
        ConfigError: `impl` is not a known name.
        BackendError: an explicit `impl` cannot be obeyed.
    """
    check_impl(where, impl)
    if impl == "reference" and path is not None:
        raise BackendError(
            f"{where}: impl='reference' is one loop over time and has no path; got {path}. "
            "Leave path out, or use impl='portable'."
        )
    if impl in ("reference", "portable"):
        return impl
    refusal = _refusal_of_path(path) or operator.refusal(tensors)
    if impl == "native" and refusal is not None:
        raise BackendError(
            f"{where}: impl='native' cannot serve this call: {refusal}. "
            "Use impl='auto' or impl='portable'."
        )
    chosen = impl if refusal is None else "portable"
    if impl == "auto":
        _tell(where, "native kernel" if refusal is None else f"portable code ({refusal})")
    return chosen


def _refusal_of_path(path: "SsdPath | None") -> str | None:
    if path is None or path.kind == "serial_recalculated":
        return None
    return f"a path names a portable algorithm, and this one is {path}"


def _tell(where: str, choice: str) -> None:
    # A traced function can neither log nor change a global set.
    if torch.compiler.is_compiling() or (where, choice) in _told:
        return
    _told.add((where, choice))
    _log.info("%s: %s", where, choice)
