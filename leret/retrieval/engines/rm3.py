"""RM3: pseudo-relevance feedback over BM25.

Words from the top documents expand the query; no LM is needed.

1. Search with BM25. The first ``fb_docs`` documents are the feedback documents.
2. Relevance model: P(w|R) = sum over feedback documents of P(w|D) x P(D). P(w|D) is the word's
   share of the document's words; P(D) is the document's share of the sum of scores. Keep the
   ``fb_terms`` most likely words; let P sum to 1.
3. Interpolate: ``original_weight`` x the query's words + (1 - ``original_weight``) x the relevance
model.
4. Search again. Each word's BM25 weight is multiplied by its weight in the interpolated query.

Words of one character and stop words are never added. In an index of 100 documents or more, words
that occur in more than 10% of the documents are not added either. A query with no words in the
vocabulary gets an empty ranking.

Source: Lavrenko and Croft, SIGIR 2001 (relevance models, RM1); Abdul-Jaleel et al., TREC 2004 (RM3,
interpolation). BM25 scores are used as query likelihoods, as in common toolkits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from leret.config.retriever import RetrieverSettings, RM3Settings
from leret.core.errors import RetrievalError
from leret.core.types import Ranking, digest
from leret.retrieval.base import CallableRetriever, Retriever, clip_k
from leret.retrieval.engines.bm25 import BM25

_COMMON = 0.1  # maximum share of documents that contain a feedback term
_FEW = 100  # below this number of documents, _COMMON is ignored
_FEEDBACK = ("fb_docs", "fb_terms", "original_weight")


class RM3(CallableRetriever):
    """BM25 with feedback terms. Thread-safe.

    ``bm25`` keeps its own settings; ``settings.bm25`` is ignored.
    """

    def __init__(self, bm25: Retriever, settings: RM3Settings | None = None) -> None:
        if not isinstance(bm25, BM25):
            raise RetrievalError(
                f"RM3 needs a retriever of kind bm25, not {type(bm25).__name__}; open a BM25 index"
            )
        self._bm25 = bm25
        self._settings = settings or RM3Settings()
        feedback = {name: getattr(self._settings, name) for name in _FEEDBACK}
        self.digest = digest("rm3", bm25.digest, feedback)

    @staticmethod
    def parts(settings: RM3Settings) -> dict[str, RetrieverSettings]:
        """Return the settings of the BM25 index.

        The empty key means that it has no folder below RM3's directory.
        """
        return {"": settings.bm25}

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        k = clip_k(k, self._bm25.n_documents)
        first = self._bm25.search(queries, self._settings.fb_docs)
        expanded_queries = []
        for query, feedback in zip(queries, first, strict=True):
            expanded = self.expanded(query, feedback) if feedback else {}
            expanded_queries.append(expanded)
        return self._bm25.search(expanded_queries, k)

    def expanded(self, query: str, feedback: Ranking) -> dict[str, float]:
        """Return the words for the second search with their weights.

        ``feedback`` is the first search's ranking.
        """
        words = self._bm25.words
        vocabulary = self._bm25.index.vocabulary
        original = Counter(word for word in words(query) if word in vocabulary)
        documents = []
        lengths = []
        for passage in feedback:
            counts = Counter(words(f"{passage.title}. {passage.text}"))
            lengths.append(counts.total())
            documents.append({word: n for word, n in counts.items() if self._is_specific(word)})
        scores = [passage.score for passage in feedback]
        model = relevance_model(documents, lengths, scores, self._settings.fb_terms)
        return interpolate(original, model, self._settings.original_weight)

    def _is_specific(self, word: str) -> bool:
        index = self._bm25.index
        n_documents = self._bm25.n_documents
        column = index.vocabulary.get(word)
        if column is None:
            return False
        frequency = int(index.indptr[column + 1] - index.indptr[column])
        return n_documents < _FEW or frequency <= _COMMON * n_documents


def relevance_model(
    documents: Sequence[Mapping[str, int]],
    lengths: Sequence[int],
    scores: Sequence[float],
    n_terms: int,
) -> dict[str, float]:
    """Return the ``n_terms`` most likely words of the documents, with weights that sum to 1.

    >>> relevance_model([{"a": 1, "b": 1}, {"b": 2}], [2, 2], [1.0, 3.0], 2)
    {'b': 0.875, 'a': 0.125}

    The weight of b is 1/4 x 1/2 + 3/4 x 1, that of a is 1/4 x 1/2. ``documents`` are word counts;
    ``lengths`` also count words that ``documents`` omits. Ties are alphabetical.
    """
    total = sum(scores)
    likely: Counter[str] = Counter()
    for counts, length, score in zip(documents, lengths, scores, strict=True):
        for word, n in counts.items():
            likely[word] += n / length * (score / total)  # type: ignore[assignment]
    ordered = sorted(likely.items(), key=lambda item: (-item[1], item[0]))
    terms = ordered[:n_terms]
    mass = sum(weight for _, weight in terms)
    return {word: weight / mass for word, weight in terms}


def interpolate(
    original: Mapping[str, int], model: Mapping[str, float], original_weight: float
) -> dict[str, float]:
    """Combine the query's words and the relevance model into one weighted query.

    Omit words of weight 0.

    >>> interpolate({"a": 1, "b": 1}, {"b": 0.5, "c": 0.5}, 0.5)
    {'a': 0.25, 'b': 0.5, 'c': 0.25}

    If ``model`` is empty, use only the query's words.
    """
    share = original_weight if model else 1.0
    n = sum(original.values())
    weights: dict[str, float] = {word: share * count / n for word, count in original.items()}
    for word, weight in model.items():
        weights[word] = weights.get(word, 0.0) + (1.0 - share) * weight
    return {word: weight for word, weight in weights.items() if weight > 0}
