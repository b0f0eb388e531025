"""The CPU kernels of this machine, as further kinds of the laws that every implementation keeps.

A kind is a name such as "serial" or "native-avx2". `running(kind)` puts its instruction set in
force for a whole law, backward included; `dtype_of(kind)` is the widest dtype that it computes in.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from anymamba.ops import native_status
from anymamba.settings import override

# Without a built library the list is empty, and the laws hold for what is left.
NATIVE = [f"native-{variant}" for variant in native_status().available]


def is_native(kind: str) -> bool:
    """Say whether a kind is a CPU kernel."""
    return kind.startswith("native-")


def dtype_of(kind: str) -> torch.dtype:
    """Return the widest dtype of a kind: the kernels compute in float32."""
    return torch.float32 if is_native(kind) else torch.float64


@contextmanager
def running(kind: str) -> Iterator[None]:
    """Put the instruction set of a kind in force; other kinds change nothing."""
    if not is_native(kind):
        yield
        return
    with override(native=kind.removeprefix("native-")):
        yield
