"""The inner loop of BM25: add up a query's columns, keep the best k.

bm25s has this loop too. Ours breaks ties by document order (bm25s's heap returns either of two equal documents), leaves
out documents that share no word with the query, and is compiled once a machine instead of once a process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

__all__ = ["top_k"]


def _worse(score: float, document: int, other_score: float, other_document: int) -> bool:
    """Does an entry rank below another one: a lower score, or the same and a later document?"""
    return score < other_score or (score == other_score and document > other_document)


def _replace_worst(scores: NDArray[np.float32], documents: NDArray[np.int32], score: float, document: int) -> None:
    """Put a better entry in the place of the worst one, which is on top of the heap, and restore the heap."""
    n, hole, child = len(scores), 0, 1
    while child < n:
        right = child + 1
        if right < n and worse(scores[right], documents[right], scores[child], documents[child]):
            child = right
        if not worse(scores[child], documents[child], score, document):
            break
        scores[hole], documents[hole] = scores[child], documents[child]
        hole, child = child, 2 * child + 1
    scores[hole], documents[hole] = score, document


def _top_k(
    words: NDArray[np.int32],
    starts: NDArray[np.int64],
    data: NDArray[np.float32],
    indices: NDArray[np.int32],
    indptr: NDArray[np.int32],
    best_documents: NDArray[np.int32],
    best_scores: NDArray[np.float32],
    n_documents: int,
) -> None:
    """Fill in the best documents of each query, in no order; unused places keep their score of 0.

    Args:
        words: (n_words,) word ids of all queries, one query after the other.
        starts: (n_queries + 1,) where each query's words start.
        data: (n_entries,) BM25 weight of a word in a document, by word.
        indices: (n_entries,) the document of each weight.
        indptr: (n_vocabulary + 1,) where each word's weights start.
        best_documents: (n_queries, k) written; document numbers.
        best_scores: (n_queries, k) 0 at the start; written: their scores.
        n_documents: in the index.
    """
    scores = np.zeros(n_documents, np.float32)
    for query in range(len(starts) - 1):
        scores[:] = 0
        for word in words[starts[query] : starts[query + 1]]:
            for entry in range(indptr[word], indptr[word + 1]):
                scores[indices[entry]] += data[entry]
        kept_scores, kept = best_scores[query], best_documents[query]  # a heap from the start: all its scores are 0
        for document in range(n_documents):
            if scores[document] > kept_scores[0]:  # an equal score comes later, so it is worse
                replace_worst(kept_scores, kept, scores[document], document)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no directory for the cache can be written
        return numba.njit(nogil=True)(function)


worse = _compiled(_worse)
replace_worst = _compiled(_replace_worst)
top_k = _compiled(_top_k)
