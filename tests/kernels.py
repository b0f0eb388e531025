"""The CPU kernels of this machine, as further kinds of the laws that every implementation keeps.

A kind is a name such as "portable", "serial" or "native-avx2". `running(kind)` puts its instruction
set in force for a whole law, backward included; `dtype_of(kind)` is its widest dtype. A test marked
`PRECISIONS` runs in float64 and, in float32, on the portable code and every kernel.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from anymamba.ops import native_status
from anymamba.settings import override

# Without a built library the lists are empty, and the laws hold for what is left.
DECODERS = [f"native-{variant}" for variant in native_status().available]
# This set has a decoder of its own, and the other kernels of avx512.
NATIVE = [kind for kind in DECODERS if kind != "native-avx512_vnni"]

EVERY_KIND = ["portable", *NATIVE]
# The fixture `dtype` of conftest.py makes a dtype of each, with its kind in force.
PRECISIONS = pytest.mark.parametrize(
    "dtype", ["float64", *(f"float32 {kind}" for kind in EVERY_KIND)], indirect=True
)


def is_native(kind: str) -> bool:
    """Say whether a kind is a CPU kernel."""
    return kind.startswith("native-")


def dtype_of(kind: str) -> torch.dtype:
    """Return the widest dtype of a kind: the kernels compute in float32."""
    return torch.float32 if is_native(kind) else torch.float64


@contextmanager
def running(kind: str) -> Iterator[None]:
    """Put the instruction set of a kind in force; "portable" turns the kernels off."""
    if is_native(kind):
        choice = kind.removeprefix("native-")
    else:
        choice = "off" if kind == "portable" else "auto"
    with override(native=choice):
        yield
