import asyncio
import threading
from types import SimpleNamespace

import pytest

from leret.retrieval import batching
from leret.retrieval.batching import SearchBatcher
from tests.sampling.fakes import FakeRetriever


def run(retriever, work):
    async def main():
        batcher = SearchBatcher(retriever)
        try:
            return await work(batcher), batcher.counts()
        finally:
            batcher.close()

    return asyncio.run(main())


def test_concurrent_searches_are_one_batch_without_repeats():
    retriever = FakeRetriever()
    asked = ["alpha", "beta", "alpha", "gamma", "beta"]
    rankings, counts = run(retriever, lambda batcher: asyncio.gather(*(batcher.search([q], 2) for q in asked)))
    assert retriever.batches == [["alpha", "beta", "gamma"]]
    assert rankings == [FakeRetriever().search([q], 2) for q in asked]
    assert counts == {"asked": 5, "searched": 3, "batches": 1}
    both = run(FakeRetriever(), lambda batcher: asyncio.gather(*(batcher.search(["alpha"], k) for k in (1, 2))))
    assert ([len(ranking) for [ranking] in both[0]], both[1]["searched"]) == ([1, 2], 2)


class Where(FakeRetriever):
    def __init__(self, only_computes):
        super().__init__()
        self.only_computes = only_computes
        self.cpu_s = self.now = 0.0
        self.on_the_loop = []

    def search(self, queries, k):
        self.on_the_loop.append(threading.current_thread() is threading.main_thread())
        self.now += self.cpu_s
        return super().search(queries, k)


@pytest.mark.parametrize(
    ("only_computes", "cpu_s", "where"),
    [
        (True, (0.0, 0.0, 0.0, 0.0), [False, True, True, True]),  # the first search may still load or compile
        (True, (0.0, 0.01, 0.0, 0.0), [False, True, False, True]),  # one that turns slow comes back
        (False, (0.0, 0.0, 0.0, 0.0), [False, False, False, False]),
    ],
)
def test_only_quick_searches_run_on_the_event_loop(only_computes, cpu_s, where, monkeypatch):
    retriever = Where(only_computes)
    clocks = SimpleNamespace(**dict.fromkeys(("perf_counter", "thread_time", "monotonic"), lambda: retriever.now))
    monkeypatch.setattr(batching, "time", clocks)

    async def work(batcher):
        for query, retriever.cpu_s in zip(("alpha", "beta", "gamma", "delta"), cpu_s, strict=True):
            quick = batcher.search_now(query, 2)
            [ranking] = await batcher.search([query], 2) if quick is None else [quick]
            assert ranking == FakeRetriever().search([query], 2)[0]

    run(retriever, work)
    assert retriever.on_the_loop == where
