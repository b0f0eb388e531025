"""The call of the decoder: tensors bound once, then one call per token."""

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba import settings
from anymamba.errors import BackendError
from anymamba.ops.decode.program import Program
from anymamba.ops.native import AXES, DTYPES, KernelCall, kernel_in_force, kernel_threads

__all__ = ["DecodeCall"]

_STATES = 3  # ids, positions and logits come first
_VIEW = 2 + AXES  # a view: address, dtype, strides
_IDS, _POSITIONS, _LOGITS = (place * _VIEW for place in range(_STATES))


class _Ready(NamedTuple):
    """Everything that a token needs but its ids and the place of its logits."""

    function: Any
    reference: Any  # of the call, for C
    ids: ctypes.Array[ctypes.c_int64]
    views: ctypes.Array[ctypes.c_int64]
    call: KernelCall
    workspace: Tensor
    switches: settings.Settings
    threads: int

    def is_current(self) -> bool:
        return settings.current() is self.switches and kernel_threads() == self.threads


class DecodeCall:
    """A program and the states of its rows, ready to be run token by token.

    The caller keeps weights and states alive, and has checked their shapes.
    """

    def __init__(
        self,
        program: Program,
        rows: int,
        states: Sequence[Sequence[Tensor]],
        position_b: Tensor,
        logits_dtype: torch.dtype,
    ) -> None:
        """Write down where everything lies: up to four states per layer.

        Args:
            program: of the model.
            rows: of the state.
            states: of each layer.
            position_b: how many tokens each row has seen.
            logits_dtype: of the logits, if they are not float32.
        """
        self.program, self.rows = program, rows
        self._views = (ctypes.c_int64 * (_VIEW * (_STATES + 4 * len(states))))()
        self._write(_POSITIONS, position_b)
        for layer, tensors in enumerate(states):
            for place, tensor in enumerate(tensors):
                self._write(_VIEW * (_STATES + 4 * layer + place), tensor)
        self._views[_LOGITS + 1 : _LOGITS + 3] = DTYPES[logits_dtype], program.head.rows
        self._sizes = (ctypes.c_int64 * 2)(rows, ctypes.addressof(program))
        # Whoever runs takes it away and puts it back: two threads, or a token that a signal brings
        # in between, never write into one. What an interrupt takes along is made anew.
        self._spare: deque[_Ready] = deque(maxlen=1)

    def run(self, ids: Sequence[int], logits_bw: Tensor | None) -> None:
        """Advance every state by one token and write the logits.

        Between two tokens the caches hold nothing of Python's, and each thing that is looked at
        costs a read of memory: all that can be is kept from token to token.

        Args:
            ids: one per row, inside the vocabulary.
            logits_bw: contiguous; float32 or what was said; None leaves the head out.

        Raises:
            BackendError: the kernel cannot run; nothing was changed.
        """
        try:
            ready = self._spare.pop()
        except IndexError:
            ready = None
        if ready is None or not ready.is_current():
            ready = self._made_ready()
        ready.ids[:] = ids
        if logits_bw is None:
            ready.views[_LOGITS] = 0
        else:
            ready.views[_LOGITS : _LOGITS + 2] = logits_bw.data_ptr(), DTYPES[logits_bw.dtype]
        ready.function(ready.reference)
        self._spare.append(ready)

    def _made_ready(self) -> _Ready:
        switches = settings.current()
        function, variant = kernel_in_force("decode")
        ids, threads = (ctypes.c_int64 * self.rows)(), kernel_threads()
        views = type(self._views).from_buffer_copy(self._views)
        views[_IDS : _IDS + 3] = ctypes.addressof(ids), DTYPES[torch.int64], 1
        # Of memory it wants the most now: logits of half types are summed there.
        call = KernelCall(
            ctypes.addressof(views), ctypes.addressof(self._sizes), None, threads, variant
        )
        reference = ctypes.byref(call)
        wanted = function(reference)
        if wanted < 0:
            raise BackendError(
                "decode: the compiled kernels read another layout of programs. Install the "
                "package again, or use impl='portable'."
            )
        # Wherever torch makes tensors by default, these bytes are the kernel's.
        workspace = torch.empty(wanted, dtype=torch.uint8, device="cpu")
        call.workspace = workspace.data_ptr()
        return _Ready(function, reference, ids, views, call, workspace, switches, threads)

    def _write(self, at: int, tensor: Tensor) -> None:
        numbers = (tensor.data_ptr(), DTYPES[tensor.dtype], *tensor.stride())
        self._views[at : at + len(numbers)] = numbers
