"""Compare BM25 over chunks with BM25 over whole documents, on real data sets.

    python benchmarks/quality/chunks.py [DATA]

DATA is the folder of data sets; the default is next to the checkout. Gold documents are the parents of chunks
(`data.gold: parent`). "documents": recall of the first k different parents; "passages": recall of the parents of the
first k chunks, which is what a program with that k reads. Lengths are tokens of the shipped policy `leret-english-6m`.

"found by itself" searches for the text of each chunk of 200 documents, and counts the chunks for which a chunk with the
same text is among the first three results.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from leret.config.data import FileSettings
from leret.core.types import Task
from leret.datasets.chunk import chunks_of, token_counter
from leret.datasets.corpus import Corpus
from leret.datasets.load import load
from leret.datasets.splits import rank_of
from leret.retrieval.engines.bm25 import BM25
from leret.rewards.ranking import recall

SETS = ("hotpotqa", "medquad")
SIZES = (253, 64)
CUTS = (3, 10)
DOCUMENTS, FOUND_AMONG = 200, 3


def recalls(bm25: BM25, tasks: list[Task]) -> list[float]:
    """Return recall at each cut-off, of documents and then of passages."""
    ids = [[p.doc_id for p in ranking] for ranking in bm25.search([task.text for task in tasks], 100)]
    values = []
    for by_document in (True, False):
        for k in CUTS:
            ranked = [task.gold_ids(one if by_document else one[:k]) for task, one in zip(tasks, ids, strict=True)]
            pairs = zip(tasks, ranked, strict=True)
            values.append(sum(recall(one, set(task.gold), k) for task, one in pairs) / len(tasks))
    return values


def found_by_itself(bm25: BM25, chunks: Corpus, parents: list[str]) -> tuple[int, int]:
    """Return how many chunks of 200 documents are found by their own text, and how many there are."""
    sample = set(sorted(parents, key=lambda doc_id: rank_of(doc_id, 0, "chunks"))[:DOCUMENTS])
    wanted = [chunk for chunk in chunks.values() if chunk.parent in sample]
    rankings = bm25.search([chunk.text for chunk in wanted], FOUND_AMONG)
    found = [any(chunk.text == p.text for p in ranking) for chunk, ranking in zip(wanted, rankings, strict=True)]
    return sum(found), len(found)


def main(data: Path) -> None:
    count = token_counter("leret-english-6m")
    print("| set | tokens | documents or chunks | documents @3 | @10 | passages @3 | @10 | found by itself |")
    print("|---|---|---|---|---|---|---|---|")
    for name in SETS:
        files = (str(data / name / f"{file}.jsonl.gz") for file in ("corpus", "queries_all"))
        corpus, questions = files
        whole = load(FileSettings(corpus=corpus, questions=questions, split="all"))
        tasks = list(whole.tasks)
        row = " | ".join(f"{value:.4f}" for value in recalls(BM25.build(whole.corpus), tasks))
        print(f"| {name} | whole | {len(whole.corpus):,} | {row} | |", flush=True)
        for size in SIZES:
            chunks = Corpus(chunk for document in whole.corpus.values() for chunk in chunks_of(document, size, count))
            bm25 = BM25.build(chunks)
            row = " | ".join(
                f"{value:.4f}" for value in recalls(bm25, [replace(task, parents=chunks.parents) for task in tasks])
            )
            found, n = found_by_itself(bm25, chunks, list(whole.corpus))
            print(f"| {name} | {size} | {len(chunks):,} | {row} | {found:,} of {n:,} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[3] / "shared" / "data"
    parser.add_argument("data", type=Path, nargs="?", default=default, metavar="DATA")
    main(parser.parse_args().data)
