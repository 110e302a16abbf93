"""One thread makes batches of what waits, and outlives a batch that fails."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from leret.core.errors import PolicyError, TrainingError
from leret.policies.local.batching import BatchWorker


def doubled(items: Sequence[int]) -> list[int | Exception]:
    if 99 in items:
        raise ValueError("a shape is wrong")
    return [TrainingError("its own") if item < 0 else 2 * item for item in items]


def worker(size: int, start: object = None) -> BatchWorker[int, int]:
    def plan(items: Sequence[int]) -> list[list[int]]:
        order = sorted(range(len(items)), key=lambda i: items[i])
        return [order[i : i + size] for i in range(0, len(order), size)]

    return BatchWorker(doubled, plan, name="doubler", start=start)


def test_what_several_threads_ask_is_answered_in_few_batches_each_its_own() -> None:
    held = threading.Event()
    shared = worker(100, start=held.wait)  # until all have asked
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(shared.submit, range(16)))
    held.set()
    assert [future.result() for future in answers] == [2 * item for item in range(16)]
    assert shared.n_batches == 1
    shared.close()


def test_a_fault_is_of_its_item_or_its_batch_and_the_worker_goes_on_until_it_is_closed() -> None:
    one = worker(1)
    futures = [one.submit(item) for item in (1, -1, 99, 3)]
    one.close()
    one.close()
    assert (futures[0].result(), futures[3].result()) == (2, 6)
    with pytest.raises(TrainingError, match="its own"):
        futures[1].result()
    with pytest.raises(PolicyError, match="ValueError: a shape is wrong"):
        futures[2].result()
    with pytest.raises(PolicyError, match="doubler is closed"):
        one.submit(1)
