"""The call of the decoder: tensors bound once, then one call per token."""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anymamba.errors import BackendError
from anymamba.ops.decode.program import Program
from anymamba.ops.native.library import load, native_status
from anymamba.settings import current

__all__ = ["MOST_ROWS", "DecodeCall", "kernel_refusal"]

# Rows that share one reading of the weights.
MOST_ROWS = 64

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 2, torch.float16: 3}
_AXES = 6
_STATES = 3  # ids, positions and logits come first
_is_forked_child = False


def _note_fork() -> None:
    global _is_forked_child
    _is_forked_child = True


# OpenMP's pool does not survive a fork: waiting for it in the child would never end.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


class _View(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("stride", ctypes.c_int64 * _AXES),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("tensors", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("variant", ctypes.c_int64),
    )


def kernel_refusal() -> str | None:
    """Say why the decoder's kernel cannot run at all; None when it can."""
    status = native_status()
    if status.why_not is not None:
        return status.why_not
    if _function() is None:
        return "the compiled kernels are older than the decoder; install the package again"
    return None


def _function() -> Any:
    library = load(current().native_library)
    return None if isinstance(library, str) else getattr(library.handle, "anymamba_decode", None)


class DecodeCall:
    """A program and the states of its rows, ready to be run token by token.

    The caller keeps weights and states alive, and has checked their shapes.
    """

    def __init__(
        self, program: Program, rows: int, states: Sequence[Sequence[Tensor]], position_b: Tensor
    ) -> None:
        """Write down where everything lies: up to four states per layer."""
        self.program, self.rows = program, rows
        self._views = (_View * (_STATES + 4 * len(states)))()
        _write(self._views[1], position_b)
        for layer, tensors in enumerate(states):
            for place, tensor in enumerate(tensors):
                _write(self._views[_STATES + 4 * layer + place], tensor)
        self._sizes = (ctypes.c_int64 * 2)(rows, ctypes.addressof(program))

    def run(self, ids_b: Tensor, logits_bw: Tensor) -> None:
        """Advance every state by one token and write the logits.

        Args:
            ids_b: one id per row; int64, contiguous, inside the vocabulary.
            logits_bw: float32, rows contiguous.

        Raises:
            BackendError: the kernel cannot run; nothing was changed.
        """
        status, function = native_status(), _function()
        library = load(current().native_library)
        if function is None or status.variant is None or isinstance(library, str):
            raise BackendError(
                f"decode: the native kernel cannot run: {kernel_refusal()}. Use impl='portable'."
            )
        function.restype = ctypes.c_int64
        # A copy of the list of views, so that two threads may run one binding.
        views = type(self._views).from_buffer_copy(self._views)
        _write(views[0], ids_b)
        _write(views[2], logits_bw)
        call = _Call(
            ctypes.addressof(views),
            ctypes.addressof(self._sizes),
            None,
            1 if _is_forked_child else torch.get_num_threads(),
            library.variants[status.variant],
        )
        wanted = function(ctypes.byref(call))
        if wanted < 0:
            raise BackendError(
                "decode: the compiled kernels read another layout of programs. Install the "
                "package again, or use impl='portable'."
            )
        workspace = torch.empty(wanted, dtype=torch.uint8)
        call.workspace = workspace.data_ptr()
        function(ctypes.byref(call))


def _write(view: Any, tensor: Tensor) -> None:
    view.data, view.dtype = tensor.data_ptr(), _DTYPES[tensor.dtype]
    for axis, stride in enumerate(tensor.stride()):
        view.stride[axis] = stride
