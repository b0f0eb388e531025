"""How many threads a kernel may use."""

import os

import torch

__all__ = ["kernel_threads"]

_in_forked_child = False


def _note_fork() -> None:
    global _in_forked_child
    _in_forked_child = True


# OpenMP's pool does not survive a fork: a parallel region in the child would wait for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def kernel_threads() -> int:
    """Return how many threads a kernel may use: torch's number, one in a forked child."""
    return 1 if _in_forked_child else torch.get_num_threads()
