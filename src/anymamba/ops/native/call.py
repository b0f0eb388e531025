"""One call of a kernel: views, sizes, workspace, threads, laid out as in `native/anymamba.h`."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anymamba.errors import BackendError
from anymamba.ops.native.library import load, native_status
from anymamba.ops.native.memory import new_tensor
from anymamba.ops.native.threads import kernel_threads
from anymamba.settings import current

__all__ = ["AXES", "DTYPES", "KernelCall", "kernel_in_force", "run_kernel"]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 2, torch.float16: 3}
AXES = 6


class KernelCall(ctypes.Structure):
    """The argument of every kernel: `anymamba_call`."""

    _fields_ = (
        ("tensors", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("variant", ctypes.c_int64),
    )


def run_kernel(name: str, tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
    """Call one kernel on the instruction set in force, with torch's number of threads.

    Args:
        name: a kernel of `native/anymamba.h`, such as "ssd_forward".
        tensors: inputs, then outputs, in the kernel's order; on the CPU; None where absent.
        sizes: axes and flags, in the kernel's order.

    Raises:
        BackendError: the kernels cannot be used.
    """
    function, variant = kernel_in_force(name)
    views = _views(tensors)
    numbers = (ctypes.c_int64 * len(sizes))(*sizes)
    call = KernelCall(
        ctypes.addressof(views), ctypes.addressof(numbers), None, kernel_threads(), variant
    )
    wanted = function(ctypes.byref(call))
    workspace = new_tensor(_any(tensors), (max(wanted, 1),), torch.uint8)
    call.workspace = workspace.data_ptr()
    function(ctypes.byref(call))


def kernel_in_force(name: str) -> tuple[Any, int]:
    """Return a kernel's function and the number of the instruction set in force.

    Raises:
        BackendError: the kernels cannot be used.
    """
    status = native_status()
    library = load(current().native_library)
    if status.variant is None or isinstance(library, str):
        raise BackendError(
            f"{name}: the native kernel cannot run: {status.why_not}. Use impl='portable'."
        )
    function = getattr(library.handle, f"anymamba_{name}")
    function.restype = ctypes.c_int64
    return function, library.variants[status.variant]


def _views(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_int64]:
    numbers: list[int] = []
    for tensor in tensors:
        if tensor is None:
            numbers.extend([0] * (2 + AXES))
            continue
        strides = tensor.stride()
        numbers.extend((tensor.data_ptr(), DTYPES[tensor.dtype], *strides))
        numbers.extend([0] * (AXES - len(strides)))
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _any(tensors: Sequence[Tensor | None]) -> Tensor:
    return next(tensor for tensor in tensors if tensor is not None)
