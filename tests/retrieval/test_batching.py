import asyncio
from contextlib import closing

from leret.retrieval.batching import SearchBatcher
from tests.sampling.fakes import FakeRetriever


def run(retriever, work):
    async def main():
        with closing(SearchBatcher(retriever)) as batcher:
            return await work(batcher), batcher.counts()

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
