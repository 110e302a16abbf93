"""Compare BM25's quality on real data sets with published figures, and its speed with bare bm25s.

    python benchmarks/quality/bm25_figures.py [DATA] [--speed] [--fold-accents]

DATA is the folder of data sets; the default is next to the checkout. The published figures keep accents. With
--fold-accents (leret's default in recipes), the table shows the effect of folding. AP is over the first 100 documents,
divided by the number of gold documents.

One published figure cannot be reproduced: AP on nfcorpus. Its queries of one or two words match fewer than 100
documents. bm25s fills the ranking with documents of score 0, some of which are gold by chance (.1414). leret does not
return documents that share no word with the query (.1401).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from leret.config.data import FileSettings
from leret.core.types import Ranking, Task
from leret.datasets.load import Data, load
from leret.retrieval.engines.bm25 import BM25
from leret.retrieval.load import open_index

SETS = {
    # name: (corpus folder, questions, recall@3, recall@10, AP@100 from the data's README)
    "hotpotqa": ("hotpotqa", "hotpotqa/queries_all", 0.625, 0.824, 0.648),
    "hover": ("hotpotqa", "hover/queries_dev", 0.716, 0.865, 0.744),
    "2wikimultihopqa": ("2wikimultihopqa", "2wikimultihopqa/queries_all", 0.606, 0.699, 0.611),
    "musique": ("musique", "musique/queries_all", 0.423, 0.551, 0.431),
    "scifact": ("scifact", "scifact/queries_dev", 0.698, 0.784, 0.639),
    "nfcorpus": ("nfcorpus", "nfcorpus/queries_test", 0.106, 0.145, 0.141),
    "medquad": ("medquad", "medquad/queries_all", 0.579, 0.909, 0.500),
}
"""Data sets and their published figures."""

DEPTH = 100


def figures(questions: Sequence[Task], rankings: Sequence[Ranking]) -> tuple[float, float, float]:
    """Return mean recall@3, recall@10 and AP@100."""
    totals = [0.0, 0.0, 0.0]
    for question, ranking in zip(questions, rankings, strict=True):
        gold, ids = set(question.gold), [passage.doc_id for passage in ranking]
        hits, precision = 0, 0.0
        for rank, doc_id in enumerate(ids[:DEPTH], start=1):
            if doc_id in gold:
                hits += 1
                precision += hits / rank
        for i, value in enumerate((len(gold & set(ids[:3])), len(gold & set(ids[:10])))):
            totals[i] += value / len(gold)
        totals[2] += precision / len(gold)
    n = len(questions)
    return totals[0] / n, totals[1] / n, totals[2] / n


def read(root: Path, name: str) -> Data:
    """Load the questions and the corpus of a data set."""
    corpus, questions, *_ = SETS[name]
    return load(
        FileSettings(
            questions=str(root / f"{questions}.jsonl.gz"), corpus=str(root / corpus / "corpus.jsonl.gz"), split="all"
        )
    )


def _seconds(work: Callable[[], object]) -> float:
    """Return the minimum time of three runs, after a warm-up call that compiles."""
    work()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _speed(data: Data, index: Path, k: int) -> str:
    import bm25s

    queries = [question.text for question in data.tasks]
    ours, bare = open_index(index), bm25s.BM25.load(str(index), mmap=True, backend="numba")

    def both() -> object:
        tokens = bm25s.tokenize(queries, return_ids=False, show_progress=False)
        return bare.retrieve(tokens, k=k, show_progress=False)

    seconds = [
        _seconds(both),
        _seconds(lambda: ours.search(queries, k)),
        _seconds(lambda: [ours.search([query], k) for query in queries]),
    ]
    return "  ".join(f"{len(queries) / value:8.0f}" for value in seconds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    parser.add_argument("data", nargs="?", type=Path, default=beside)
    parser.add_argument("--speed", action="store_true", help="also print queries per second at k = 3")
    parser.add_argument("--fold-accents", action="store_true")
    arguments = parser.parse_args()
    heads = "  bare bm25s     batch   one at a time (queries/s, k=3)" if arguments.speed else ""
    print(f"{'set':16} {'recall@3':>18} {'recall@10':>18} {'AP@100':>18}   (ours, published){heads}")
    for name, (*_, r3, r10, ap) in SETS.items():
        data = read(arguments.data, name)
        with tempfile.TemporaryDirectory() as scratch:
            index = Path(scratch) / "bm25"
            retriever = BM25.build(data.corpus, index, fold_accents=arguments.fold_accents)
            found = figures(data.tasks, retriever.search([q.text for q in data.tasks], DEPTH))
            cells = "  ".join(f"{ours:8.4f} {theirs:7.3f} " for ours, theirs in zip(found, (r3, r10, ap), strict=True))
            print(f"{name:16} {cells} {_speed(data, index, 3) if arguments.speed else ''}", flush=True)


if __name__ == "__main__":
    main()
