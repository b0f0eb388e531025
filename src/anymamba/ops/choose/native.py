"""The call of the kernel that chooses tokens: an id and the largest logit of every row."""

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.ops.native import (
    AXES,
    DTYPES,
    KernelCall,
    kernel_in_force,
    kernel_threads,
    native_status,
)

__all__ = ["Chosen", "TokenChooser", "choosing_refusal"]

_VIEW = 2 + AXES  # numbers of a view: data, dtype, strides
_OPTIONS = 7  # sizes and options in front of the rows' numbers


class Chosen(NamedTuple):
    """A token for each row, and the row's largest logit; NaN counts as the largest."""

    ids: list[int]
    best: list[float]


def choosing_refusal(logits_bw: Tensor) -> str | None:
    """Say why the kernel cannot choose from these logits; None when it can."""
    if logits_bw.device.type != "cpu" or type(logits_bw) is not Tensor:
        return "the compiled kernel reads plain tensors on the CPU"
    if logits_bw.dtype != torch.float32 or logits_bw.stride(-1) != 1:
        return "the compiled kernel reads float32 whose rows are contiguous"
    return native_status().why_not


class TokenChooser:
    """Chooses a token per row: the likeliest, or a draw after temperature, top-k, top-p and min-p.

    It keeps what a call needs, because after a token everything costs: for one thread at a time.

    Args:
        is_greedy: take the likeliest, the first of equal ones, and ignore the rest.
        temperature: positive; divides the logits.
        top_k: keep this many likeliest tokens, and those that tie with the last; 0 means all.
        top_p: keep the likeliest tokens until their mass reaches this; 1 means all.
        min_p: keep tokens at least this likely, relative to the likeliest; 0 means all.

    Example:
        >>> chooser = TokenChooser(is_greedy=True)
        >>> logits_bw = torch.tensor([[0.0, 2.0, 1.0]])
        >>> if choosing_refusal(logits_bw) is None:
        ...     assert chooser.choose(logits_bw, [0.5]) == Chosen(ids=[1], best=[2.0])
    """

    def __init__(
        self,
        *,
        is_greedy: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> None:
        """Write the options down."""
        self._flags = is_greedy, top_k
        self._reals = temperature, top_p, min_p
        self._bound: _Bound | None = None

    def choose(self, logits_bw: Tensor, numbers: Sequence[float]) -> Chosen:
        """Choose.

        Args:
            logits_bw: what `choosing_refusal` does not refuse.
            numbers: one per row, from 0 to less than 1; a draw depends on it and nothing else.

        Returns:
            The ids and the largest logits; an id means nothing where that is not finite.

        Raises:
            BackendError: the kernels cannot be used.
        """
        bound = self._bound
        if bound is None or bound.shape != logits_bw.shape:
            self._bound = bound = _Bound(logits_bw.shape, self._flags, self._reals)
        return bound.run(logits_bw, numbers)


class _Bound:
    """A call for logits of one shape: options, results and workspace at their places."""

    def __init__(
        self, shape: torch.Size, flags: tuple[bool, int], reals: tuple[float, float, float]
    ) -> None:
        self.shape = shape
        rows, width = shape
        self._function, variant = kernel_in_force("choose")
        self._numbers = struct.Struct(f"{rows}d")
        bits = struct.unpack("3q", struct.pack("3d", *reals))
        self._sizes = (ctypes.c_int64 * (_OPTIONS + rows))(rows, width, *flags, *bits)
        self._ids, self._best = (ctypes.c_int64 * rows)(), (ctypes.c_float * rows)()
        self._views = (ctypes.c_int64 * (3 * _VIEW))()
        self._views[:2] = 0, DTYPES[torch.float32]
        self._views[_VIEW : _VIEW + 2] = ctypes.addressof(self._ids), DTYPES[torch.int64]
        best = ctypes.addressof(self._best), DTYPES[torch.float32]
        self._views[2 * _VIEW : 2 * _VIEW + 2] = best
        self._call = KernelCall(
            ctypes.addressof(self._views),
            ctypes.addressof(self._sizes),
            None,
            min(rows, kernel_threads()),
            variant,
        )
        wanted = self._function(ctypes.byref(self._call))
        self._workspace = torch.empty(wanted, dtype=torch.uint8, device="cpu")
        self._call.workspace = self._workspace.data_ptr()

    def run(self, logits_bw: Tensor, numbers: Sequence[float]) -> Chosen:
        self._views[0], self._views[2] = logits_bw.data_ptr(), logits_bw.stride(0)
        self._numbers.pack_into(self._sizes, 8 * _OPTIONS, *numbers)
        self._function(ctypes.byref(self._call))
        return Chosen(self._ids[:], self._best[:])
