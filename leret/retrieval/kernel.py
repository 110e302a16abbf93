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

_FEW = 4
"""A query's documents are walked along again where they are fewer than one in so many; otherwise all are scanned."""
_BLOCK = 128
"""Documents that are passed over at once."""


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
    scores = np.zeros(n_documents, np.float32)  # all 0 again after every query
    for query in range(len(starts) - 1):
        columns = words[starts[query] : starts[query + 1]]
        n_entries = 0
        for word in columns:
            n_entries += indptr[word + 1] - indptr[word]
            for entry in range(indptr[word], indptr[word + 1]):
                scores[indices[entry]] += data[entry]
        kept_scores, kept = best_scores[query], best_documents[query]  # a heap from the start: all its scores are 0
        if _FEW * n_entries < n_documents:
            among_touched(columns, indices, indptr, scores, kept_scores, kept)
        else:
            among_all(scores, kept_scores, kept)


def _among_touched(
    columns: NDArray[np.int32],
    indices: NDArray[np.int32],
    indptr: NDArray[np.int32],
    scores: NDArray[np.float32],
    kept_scores: NDArray[np.float32],
    kept: NDArray[np.int32],
) -> None:
    """Keep the best of the documents that share a word with the query, by a second walk along its words."""
    for word in columns:
        for entry in range(indptr[word], indptr[word + 1]):
            document = indices[entry]
            score = scores[document]
            if score > 0:  # not met before on this walk
                scores[document] = 0
                if worse(kept_scores[0], kept[0], score, document):
                    replace_worst(kept_scores, kept, score, document)


def _among_all(scores: NDArray[np.float32], kept_scores: NDArray[np.float32], kept: NDArray[np.int32]) -> None:
    """Keep the best of all documents; a block none of whose scores is high enough is passed over whole."""
    for start in range(0, len(scores), _BLOCK):
        block = scores[start : start + _BLOCK]
        if highest(block) > kept_scores[0]:
            for i in range(len(block)):
                if block[i] > kept_scores[0]:  # an equal score comes later, so it is worse
                    replace_worst(kept_scores, kept, block[i], start + i)
        block[:] = 0


def _highest(scores: NDArray[np.float32]) -> np.float32:
    """The highest of some scores, at least 0."""
    best = np.float32(0)
    for score in scores:
        best = max(best, score)
    return best


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any]
    try:
        compiled = numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # no directory for the cache can be written
        compiled = numba.njit(nogil=True, **options)(function)
    return compiled


worse = _compiled(_worse)
replace_worst = _compiled(_replace_worst)
highest = _compiled(_highest, fastmath=True)  # the order of a maximum does not matter, and so it is vectorized
among_all = _compiled(_among_all)
among_touched = _compiled(_among_touched)
top_k = _compiled(_top_k)
