"""The CPU kernels: found, loaded, and called through their C interface.

Nothing here is needed: without the compiled library every operator runs its portable body.
"""

from anymamba.ops.native.call import (
    AXES,
    DTYPES,
    KernelCall,
    kernel_in_force,
    run_kernel,
)
from anymamba.ops.native.kernel import Kernel, check_storage, refusal_of
from anymamba.ops.native.library import NativeStatus, native_status
from anymamba.ops.native.memory import copy_to_large_pages, keep_freed_memory, new_tensor
from anymamba.ops.native.threads import kernel_threads

__all__ = [
    "AXES",
    "DTYPES",
    "Kernel",
    "KernelCall",
    "NativeStatus",
    "check_storage",
    "copy_to_large_pages",
    "keep_freed_memory",
    "kernel_in_force",
    "kernel_threads",
    "native_status",
    "new_tensor",
    "refusal_of",
    "run_kernel",
]
