"""New memory in pages as large as the system has: for what the kernels write, and for weights.

The C library hands memory of more than 32 MB back to the system as soon as it is freed, so every
call that returns a tensor of that size meets new pages. By default they have 4 KB, and each costs a
fault of its own: a sixth of the SSD core's forward, and a third of the selective scan's forward and
backward, in a trial with 65,536 tokens on two cores. Linux gives pages of 2 MB to
those who ask (`madvise`); the numbers are the same.

Smaller tensors come from the heap, where memory that was used before keeps its pages. For them the
reader may gain: the next kernel takes rows that lie a page or more apart, and looks up fewer pages.
The scan of a Mamba-3 block, which reads keys and queries so, took 6 to 32% less processor time on
one thread in three noisy pairs; the time of the whole block on two threads did not show it.

A program may decide that freed memory stays (`keep_freed_memory`).

The threads of a kernel walk along time side by side and would all meet a new page at once: each
fills one of its own, and all but one are thrown away. So the pages are first touched in turn, each
thread a stretch of its own.

A decoded token reads every weight once. In small pages the processor looks up 128,000 of them for
half a gigabyte, and its own fetching ahead stops at the end of each. To move pages together later
(MADV_COLLAPSE) takes 4 ms for every 2 MB, which decoding would have to earn back; to ask before the
first touch takes nothing, and loading a checkpoint touches new memory anyway.
"""

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from anymamba.ops.native.threads import kernel_threads

__all__ = ["copy_to_large_pages", "keep_freed_memory", "new_tensor"]

# From here on a tensor has a large page of its own wherever it begins.
_HAS_LARGE_PAGES = 4 << 20
_ALWAYS_NEW = 32 << 20
_PAGE = 4096
_LARGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14
# Of mallopt, in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
_MAPPED_APART = 1 << 30, 32 << 20
# Several times per page, so that there are enough of them for torch to share out to its threads.
_BETWEEN_TOUCHES = 1024


def new_tensor(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised tensor on the device of `like`, and in its dtype unless one is given.

    Example:
        >>> new_tensor(torch.zeros(2), (3, 4), torch.bfloat16).shape
        torch.Size([3, 4])
    """
    tensor = like.new_empty(shape, dtype=dtype or like.dtype)
    if (
        tensor.device.type != "cpu"
        or tensor.nbytes < _HAS_LARGE_PAGES
        or (advise := _madvise()) is None
    ):
        return tensor
    # Whole pages only. A refusal (a kernel without large pages) leaves small ones, which serve.
    start = -(-tensor.data_ptr() // _PAGE) * _PAGE
    stop = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE
    advise(start, stop - start, _MADV_HUGEPAGE)
    if tensor.nbytes >= _ALWAYS_NEW and kernel_threads() > 1:
        tensor.view(-1).view(torch.uint8)[::_BETWEEN_TOUCHES].zero_()
    return tensor


def copy_to_large_pages(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a contiguous copy on the CPU, for weights that are read again and again.

    From 2 MB on the copy has a mapping of its own, because memory that was in use before keeps its
    small pages. Its whole large pages are asked for; what is left over lies in small ones, so that
    no memory is wasted.

    Args:
        tensor: what is copied, on any device.
        dtype: of the copy; that of the tensor by default.

    Example:
        >>> copy_to_large_pages(torch.ones(2, 3).T, torch.bfloat16).is_contiguous()
        True
    """
    dtype = dtype or tensor.dtype
    count = tensor.numel() * dtype.itemsize // _LARGE_PAGE
    if count == 0 or (advise := _madvise()) is None:
        return torch.empty(tensor.shape, dtype=dtype, device="cpu").copy_(tensor)
    room = tensor.numel() * dtype.itemsize + _LARGE_PAGE
    area = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(area, dtype=torch.uint8).data_ptr()
    start = -address % _LARGE_PAGE
    # A refusal leaves small pages, as above.
    advise(address + start, count * _LARGE_PAGE, _MADV_HUGEPAGE)
    copy = torch.frombuffer(area, dtype=dtype, count=tensor.numel(), offset=start)
    return copy.view(tensor.shape).copy_(tensor)


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for what the process allocates next.

    A training loop frees and allocates the same large tensors in every step. By default each of
    them goes back to the system and comes again as new pages, which have to be filled with zeros;
    in a virtual machine the host may have to find them first.

    It is a decision about the whole process, and memory that is kept is missing elsewhere: from
    then on the process holds what it needed at its peak, but for single blocks of a gigabyte and
    more. So programs decide it, not libraries: `anymamba train` and `anymamba bench` do. Call it
    once, at the beginning.

    Returns:
        Whether the C library agreed. Only glibc (most Linux systems) knows this, and old versions
        keep blocks up to 32 MB only.

    Example:
        >>> keep_freed_memory()  # doctest: +SKIP
        True
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    # Any setting ends the adapting of the others, so blocks of what size are kept comes first.
    return any(mallopt(_M_MMAP_THRESHOLD, size) for size in _MAPPED_APART) and bool(
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
    )


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
