"""Searches of many tasks share batches."""

import asyncio
import threading
import time

import pytest

from leret.core.errors import RetrievalError
from leret.retrieval.batching import SearchBatcher
from tests.sampling.fakes import FakeRetriever


def run(work, retriever=None, **settings):
    async def main():
        front = SearchBatcher(retriever or FakeRetriever(), **settings)
        try:
            return await work(front), front
        finally:
            front.close()

    return asyncio.run(main())


def test_what_is_asked_at_once_is_one_batch_without_repeats():
    retriever = FakeRetriever()
    asked = ["alpha", "beta", "alpha", "gamma", "beta"]
    rankings, front = run(lambda f: asyncio.gather(*(f.search([q], 2) for q in asked)), retriever)
    assert retriever.batches == [["alpha", "beta", "gamma"]]
    assert rankings == [FakeRetriever().search([q], 2) for q in asked]
    assert front.counts() == {"asked": 5, "searched": 3, "batches": 1}


def test_the_same_query_with_another_k_is_another_search():
    rankings, front = run(lambda f: asyncio.gather(f.search(["alpha"], 1), f.search(["alpha"], 2)))
    assert [len(ranking) for [ranking] in rankings] == [1, 2]
    assert front.counts()["searched"] == 2


class Slow(FakeRetriever):
    """Holds its first batch back until it is let go."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def search(self, queries, k):
        if not self.batches:
            self.go.wait(30)
        return super().search(queries, k)


def test_searches_that_come_while_a_batch_is_out_are_the_next_batch():
    retriever = Slow()

    async def work(front):
        first = asyncio.create_task(front.search(["alpha"], 2))
        await asyncio.sleep(0.05)
        rest = [asyncio.create_task(front.search([q], 2)) for q in ("beta", "gamma", "beta")]
        await asyncio.sleep(0.05)
        retriever.go.set()
        await asyncio.gather(first, *rest)

    run(work, retriever)
    assert retriever.batches == [["alpha"], ["beta", "gamma"]]


def test_a_failure_is_not_remembered():
    retriever = FakeRetriever(broken=["alpha"])

    async def work(front):
        with pytest.raises(RetrievalError):
            await front.search(["alpha"], 2)
        retriever.broken.clear()
        return await front.search(["alpha"], 2)

    [ranking], _ = run(work, retriever)
    assert ranking


class Where(FakeRetriever):
    """Knows in which thread it was asked."""

    def __init__(self, only_computes, cpu_s=0.0):
        super().__init__()
        self.only_computes = only_computes
        self.cpu_s = cpu_s
        self.on_the_loop = []

    def search(self, queries, k):
        self.on_the_loop.append(threading.current_thread() is threading.main_thread())
        until = time.thread_time() + self.cpu_s * len(queries)
        while time.thread_time() < until:
            pass
        return super().search(queries, k)


async def asked_at_once(searches, query):
    found = searches.search_now(query, 2)
    [ranking] = await searches.search([query], 2) if found is None else [found]
    assert ranking == FakeRetriever().search([query], 2)[0]


@pytest.mark.parametrize(
    ("only_computes", "cpu_s", "where"),
    [
        (True, 0.0, [False, True, True]),  # the first search may still load or compile
        (True, 0.005, [False, False, False]),
        (False, 0.0, [False, False, False]),
    ],
)
def test_only_quick_computing_is_done_at_once(only_computes, cpu_s, where):
    retriever = Where(only_computes, cpu_s)

    async def work(searches):
        for query in ("alpha", "beta", "gamma"):
            await asked_at_once(searches, query)

    run(work, retriever)
    assert retriever.on_the_loop == where


def test_a_search_that_turns_slow_leaves_the_loop_and_comes_back():
    retriever = Where(True)

    async def work(searches):
        for query, cpu_s in (("alpha", 0.0), ("beta", 0.005), ("gamma", 0.0), ("delta", 0.0)):
            retriever.cpu_s = cpu_s
            await asked_at_once(searches, query)

    run(work, retriever)
    assert retriever.on_the_loop == [False, True, False, True]
