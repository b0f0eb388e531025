"""The call of the decoder: tensors bound once, then one call per token."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anymamba.errors import BackendError
from anymamba.ops.decode.program import Program
from anymamba.ops.native import AXES, DTYPES, KernelCall, kernel_in_force, kernel_threads

__all__ = ["DecodeCall"]

_STATES = 3  # ids, positions and logits come first


class _View(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("stride", ctypes.c_int64 * AXES),
    )


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

    def run(self, ids_b: Tensor, logits_bw: Tensor | None) -> None:
        """Advance every state by one token and write the logits.

        Args:
            ids_b: one id per row; int64, contiguous, inside the vocabulary.
            logits_bw: float32, rows contiguous; None leaves the head out.

        Raises:
            BackendError: the kernel cannot run; nothing was changed.
        """
        function, variant = kernel_in_force("decode")
        # A copy of the list of views, so that two threads may run one binding.
        views = type(self._views).from_buffer_copy(self._views)
        _write(views[0], ids_b)
        if logits_bw is not None:
            _write(views[2], logits_bw)
        call = KernelCall(
            ctypes.addressof(views), ctypes.addressof(self._sizes), None, kernel_threads(), variant
        )
        wanted = function(ctypes.byref(call))
        if wanted < 0:
            raise BackendError(
                "decode: the compiled kernels read another layout of programs. Install the "
                "package again, or use impl='portable'."
            )
        # Wherever torch makes tensors by default, these bytes are the kernel's.
        workspace = torch.empty(wanted, dtype=torch.uint8, device="cpu")
        call.workspace = workspace.data_ptr()
        function(ctypes.byref(call))


def _write(view: Any, tensor: Tensor) -> None:
    view.data, view.dtype = tensor.data_ptr(), DTYPES[tensor.dtype]
    for axis, stride in enumerate(tensor.stride()):
        view.stride[axis] = stride
