"""Ranks that are started again agree with each other, and not with those that died."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from anymamba.errors import BackendError
from anymamba.train import agree_on_a_word

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no processes")

LIMIT = timedelta(seconds=20)


def start(store: "dist.Store", size: int, order: list[int]) -> list[str]:
    """Start ranks in an order, on threads; return the word of each."""
    with ThreadPoolExecutor(size) as threads:
        futures = {
            rank: threads.submit(agree_on_a_word, store, rank, size, LIMIT) for rank in order
        }
        return [futures[rank].result() for rank in range(size)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_every_start_has_a_word_of_its_own(order: list[int]):
    """All ranks of a start say the same, whoever comes first, and no two starts do."""
    store = dist.HashStore()
    words = [start(store, 3, order) for _ in range(3)]
    assert all(len(set(said)) == 1 for said in words)
    assert len({said[0] for said in words}) == 3


def test_a_call_of_the_dead_is_no_confirmation():
    """The first rank of a new start waits for those of today, not for calls that were left."""
    store = dist.HashStore()
    store.set("call/1", "old")
    store.set("answer/old", "word of the dead")
    store.set("confirmed/word of the dead/1", "")
    with pytest.raises(BackendError, match=r"ranks \[1\] did not"):
        agree_on_a_word(store, 0, 2, timedelta(seconds=0.2))
    assert len(set(start(store, 2, [1, 0]))) == 1


def test_a_rank_that_nobody_answers_says_so():
    """Without the first rank the others end, with its number."""
    with pytest.raises(BackendError, match=r"ranks \[0\] did not"):
        agree_on_a_word(dist.HashStore(), 1, 2, timedelta(seconds=0.2))
