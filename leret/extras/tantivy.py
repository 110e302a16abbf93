"""BM25 over a tantivy index on disk, for corpora too large to index with bm25s.

Words come from the analyzer of `engines.bm25` and are joined by spaces, so that tantivy only splits
at spaces. A query becomes a disjunction of its words and never reaches tantivy's query parser.
Scores differ from bm25s: tantivy fixes k1 = 1.2 and b = 0.75, and rounds the lengths of long
documents.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

from leret.config.retriever import AnalyzerSettings, EngineSettings
from leret.core.errors import RetrievalError, import_optional
from leret.core.progress import Progress
from leret.core.types import Ranking
from leret.retrieval.base import CallableRetriever, Documents, clip_k
from leret.retrieval.index.documents import DocumentTable
from leret.retrieval.index.manifest import IndexEngine
from leret.retrieval.load import EngineKind

_FOLDER = "tantivy"
_HEAP = 256_000_000  # bytes that a build buffers in memory before it writes to disk
_REPORTED = 10_000
_BATCH = 64
"""Queries searched at once. With thousands, Python's garbage collector takes 5 % of the time."""


class TantivySettings(AnalyzerSettings, EngineSettings):
    """BM25 by tantivy (k1 = 1.2, b = 0.75), with the index on disk."""

    kind: Literal["tantivy"] = "tantivy"


def _analyzer(settings: TantivySettings) -> Callable[[str], list[str]]:
    from leret.retrieval.engines.bm25 import make_analyzer  # imports numba

    return make_analyzer(settings)


class Tantivy(CallableRetriever):
    """BM25 search with tantivy. Thread-safe.

    Documents that contain no query word are not returned. Ties keep corpus order.
    """

    only_computes: ClassVar[bool] = True

    def __init__(self, documents: DocumentTable, index: Any, settings: TantivySettings) -> None:
        self._passages = documents.passages
        tantivy = import_optional("tantivy", "tantivy", "tantivy")
        self._query = tantivy.Query
        self._should = tantivy.Occur.Should
        self._schema = index.schema
        self._searcher = index.searcher()
        # One thread wrote the index, so tantivy keeps ties in corpus order within a segment.
        self._in_order = self._searcher.num_segments == 1
        self._words = _analyzer(settings)
        self._n_documents = len(documents)
        self.digest = TantivyIndex(settings).digest(documents.digest)

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        k = clip_k(k, self._n_documents)
        rankings: list[Ranking] = []
        for start in range(0, len(queries), _BATCH):
            rankings += self._rankings(queries[start : start + _BATCH], k)
        return rankings

    def _rankings(self, queries: Sequence[str], k: int) -> list[Ranking]:
        addresses: list[Any] = []
        scores_by_query = []
        for query in queries:
            hits = self._hits(query, k)
            addresses += [address for _, address in hits]
            scores_by_query.append([score for score, _ in hits])
        rows = iter(self._searcher.fast_field_values("place", addresses))
        rankings = []
        for scores in scores_by_query:
            rows_of_query = list(islice(rows, len(scores)))
            rankings.append(self._ranking(rows_of_query, scores, k))
        return rankings

    def _hits(self, query: str, k: int) -> list[tuple[float, Any]]:
        """Return scores and addresses, best first.

        If the index has several segments, include all ties at rank k.
        """
        words = self._words(query)
        if not words:
            return []
        wanted = self._disjunction(words)
        n = k if self._in_order else min(k + 1, self._n_documents)
        while True:
            hits: list[tuple[float, Any]] = self._searcher.search(wanted, limit=n, count=False).hits
            if self._in_order or len(hits) < n or n == self._n_documents:
                return hits
            if hits[-1][0] != hits[k - 1][0]:
                return hits
            n = min(2 * n, self._n_documents)  # until all ties at rank k are included

    def _ranking(self, rows: list[int], scores: list[float], k: int) -> Ranking:
        if not self._in_order and len(set(scores)) < len(scores):
            best = sorted(zip((-score for score in scores), rows, strict=True))
            scores = [-score for score, _ in best]
            rows = [row for _, row in best]
        return self._passages(rows[:k], scores[:k])

    def _disjunction(self, words: list[str]) -> Any:
        """Return a query that matches any of the words. A repeated word is boosted by its count."""
        clauses = []
        for word, n in Counter(words).items():
            term = self._query.term_query(self._schema, "words", word, "freq")
            if n > 1:
                term = self._query.boost_query(term, float(n))
            clauses.append((self._should, term))
        return self._query.boolean_query(clauses)


@dataclass(frozen=True)
class TantivyIndex(IndexEngine):
    """Builds and opens tantivy indexes. A build needs about 256 MB of memory for any corpus."""

    settings: TantivySettings
    packages = ("tantivy",)

    def write(self, corpus: Documents, directory: Path, progress: Progress) -> None:
        tantivy = import_optional("tantivy", "tantivy", "tantivy")
        words = _analyzer(self.settings)
        builder = tantivy.SchemaBuilder()
        builder.add_text_field("words", tokenizer_name="whitespace", index_option="freq")
        builder.add_unsigned_field("place", fast=True)
        folder = directory / _FOLDER
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed build
        folder.mkdir()
        progress.start("index words", len(corpus))
        try:
            writer = tantivy.Index(builder.build(), path=str(folder)).writer(_HEAP, 1)
            n_words = 0
            for row, document in enumerate(map(corpus.__getitem__, corpus)):
                terms = words(f"{document.title}. {document.text}")
                n_words += len(terms)
                indexed = tantivy.Document()
                indexed.add_text("words", " ".join(terms))
                indexed.add_unsigned("place", row)
                writer.add_document(indexed)
                if row % _REPORTED == _REPORTED - 1:
                    progress.advance(_REPORTED)
            progress.advance(len(corpus) % _REPORTED)
            writer.commit()
            writer.wait_merging_threads()
        except ValueError as error:  # tantivy raises ValueError for every failure, even a full disk
            raise RetrievalError(
                f"{directory}: tantivy cannot write the index ({error}); "
                "free some space, or choose another directory"
            ) from error
        if not n_words:
            raise RetrievalError(
                f"none of the {len(corpus)} documents contains a word to index; check the corpus"
            )
        progress.finish()

    def open(self, directory: Path, documents: DocumentTable) -> Tantivy:
        tantivy = import_optional("tantivy", "tantivy", "tantivy")
        try:
            index = tantivy.Index.open(str(directory / _FOLDER))
            index.config_reader("manual")
            index.reload()
        except (ValueError, OSError) as error:
            raise RetrievalError(
                f"{directory}: tantivy cannot open the index ({error}); build it again"
            ) from error
        return Tantivy(documents, index, self.settings)


TANTIVY = EngineKind(TantivySettings, TantivyIndex, "index")
