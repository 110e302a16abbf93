"""One thread makes batches of what waits, and outlives a batch that fails."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from leret.core.errors import PolicyError, TrainingError
from leret.policies.local.batching import BatchWorker


def doubled(items: Sequence[int]) -> list[int | Exception]:
    if 99 in items:
        raise ValueError("a shape is wrong")
    return [TrainingError("its own") if item < 0 else 2 * item for item in items]


def worker(size: int = 100) -> BatchWorker[int, int]:
    def plan(items: Sequence[int]) -> list[list[int]]:
        order = sorted(range(len(items)), key=lambda i: items[i])
        return [order[i : i + size] for i in range(0, len(order), size)]

    return BatchWorker(doubled, plan, name="doubler")


def test_what_several_threads_ask_is_answered_in_few_batches_each_its_own() -> None:
    shared, answers = worker(), {}
    held = threading.Event()
    shared._start = held.wait  # until all have asked

    def ask(item: int) -> None:
        answers[item] = shared.submit(item)

    threads = [threading.Thread(target=ask, args=(item,)) for item in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held.set()
    assert {item: future.result() for item, future in answers.items()} == {item: 2 * item for item in range(16)}
    assert shared.n_batches == 1
    shared.close()


def test_a_fault_is_of_its_item_or_its_batch_and_the_worker_goes_on() -> None:
    one = worker(size=1)
    futures = [one.submit(item) for item in (1, -1, 99, 3)]
    assert (futures[0].result(), futures[3].result()) == (2, 6)
    with pytest.raises(TrainingError, match="its own"):
        futures[1].result()
    with pytest.raises(PolicyError, match="ValueError: a shape is wrong"):
        futures[2].result()
    one.close()


def test_a_closed_worker_finishes_what_waits_and_refuses_more() -> None:
    one = worker()
    future = one.submit(4)
    one.close()
    one.close()
    assert future.result() == 8
    with pytest.raises(PolicyError, match="doubler is closed"):
        one.submit(1)
