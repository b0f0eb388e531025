"""How the ranks that `torchrun` started find each other, also when it starts them again.

torchrun keeps one store for all restarts, and the addresses of dead processes stay in it: a rank
that looks for its neighbour too early finds the one that died (pytorch/pytorch#135712). So every
start agrees on a word first, and everything else is kept under that word.
"""

import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from anymamba.errors import BackendError

__all__ = ["agree_on_a_word", "join_group"]

_PAUSE = 0.05


def join_group(backend: str, limit: timedelta) -> None:
    """Make the default group of the ranks that torchrun started.

    Args:
        backend: how they talk.
        limit: how long to wait for the slowest; also that of the group's messages.

    Raises:
        BackendError: a rank did not come in time.
    """
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://", timeout=limit))
    word = agree_on_a_word(store, rank, size, limit)
    own = dist.PrefixStore(word, store)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=limit)


def agree_on_a_word(
    store: "dist.Store",  # pyright: ignore[reportPrivateImportUsage]
    rank: int,
    size: int,
    limit: timedelta,
) -> str:
    """Return a word that this start of all ranks has in common, and no earlier one had.

    The first rank makes it up, and tells it to everybody who is there. Each of the others makes up
    a word of its own for the answer, so that no old answer is taken for it; the first one answers
    old calls too, and goes on until everybody of today has confirmed.

    Args:
        store: shared by all ranks, and perhaps by those of earlier starts.
        rank: this one.
        size: how many there are.
        limit: how long to wait.

    Raises:
        BackendError: a rank did not come in time.
    """
    mine = secrets.token_hex(8)
    if rank > 0:
        store.set(f"call/{rank}", mine)
        try:
            store.wait([f"answer/{mine}"], limit)
        except RuntimeError as error:
            raise _late(size, limit, [0]) from error
        word = store.get(f"answer/{mine}").decode()
        store.set(f"confirmed/{word}/{rank}", "")
        return word
    missing, end = set(range(1, size)), time.monotonic() + limit.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"call/{other}"]):
                store.set(f"answer/{store.get(f'call/{other}').decode()}", mine)
        missing = {other for other in missing if not store.check([f"confirmed/{mine}/{other}"])}
        if missing and time.monotonic() > end:
            raise _late(size, limit, sorted(missing))
        time.sleep(_PAUSE if missing else 0)
    return mine


def _late(size: int, limit: timedelta, missing: list[int]) -> BackendError:
    return BackendError(
        f"train: all {size} ranks must come within {limit.total_seconds():.0f} s; ranks {missing} "
        "did not. Look for their errors, then start again."
    )
