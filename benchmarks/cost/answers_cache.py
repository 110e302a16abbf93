"""Measure the cost of a cache hit against a BM25 search.

    python benchmarks/cost/answers_cache.py [DATA]

Prints CPU-microseconds per query on HotpotQA's 29,082 documents at k = 3 and 10, for BM25 and the cache, with single
queries and in batches of 256. Each figure is the minimum of three interleaved rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from leret.config.data import FileSettings
from leret.datasets.load import load
from leret.retrieval.base import Retriever
from leret.retrieval.caching import CachedRetriever
from leret.retrieval.engines.bm25 import BM25

BATCH = 256


def cpu_us(work: Callable[[], object], n: int) -> float:
    """Return CPU-microseconds per query of ``work``, which runs ``n`` queries."""
    began = time.process_time()
    work()
    return (time.process_time() - began) / n * 1e6


def main() -> None:
    """Print the table."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA", nargs="?", type=Path, default=beside, help="folder of data sets")
    folder = parser.parse_args().data
    data = load(
        FileSettings(
            questions=str(folder / "hotpotqa/queries_all.jsonl.gz"),
            corpus=str(folder / "hotpotqa/corpus.jsonl.gz"),
            split="all",
        )
    )
    queries = [question.text for question in data.tasks]
    n = len(queries)

    def single(retriever: Retriever, k: int) -> Callable[[], object]:
        return lambda: [retriever.search([query], k) for query in queries]

    def batched(retriever: Retriever, k: int) -> Callable[[], object]:
        return lambda: [retriever.search(queries[start : start + BATCH], k) for start in range(0, n, BATCH)]

    with tempfile.TemporaryDirectory() as scratch:
        bm25 = BM25.build(data.corpus, Path(scratch) / "index")
        cached = CachedRetriever(bm25, Path(scratch) / "cache")
        for k in (3, 10):
            cached.search(queries, k)
            ways = {
                "BM25, single": single(bm25, k),
                "cache, single": single(cached, k),
                "BM25, batches": batched(bm25, k),
                "cache, batches": batched(cached, k),
            }
            best: dict[str, float] = {}
            for _ in range(3):
                for name, work in ways.items():
                    best[name] = min(best.get(name, float("inf")), cpu_us(work, n))
            print(f"k={k}: " + "  ".join(f"{name} {us:.0f} us" for name, us in best.items()), flush=True)
        size = sum(path.stat().st_size for path in (Path(scratch) / "cache").rglob("*") if path.is_file())
        print(f"files: {size / 2**20:.1f} MB for {2 * n:,} rankings")


if __name__ == "__main__":
    main()
