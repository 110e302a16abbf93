"""The inner loop of BM25: add up a query's columns, keep the best k.

bm25s has this loop too. This one breaks ties by document order (bm25s's heap returns either of two equal documents),
leaves out documents without a word of the query, and is compiled once per machine instead of once per process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

_FEW = 2  # scan all documents if more than one in this many has a word of the query
_BLOCK = 16  # documents skipped at once


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    try:
        return numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # no directory is writable for the cache
        return numba.njit(nogil=True, **options)(function)


@_compiled
def _worse(score: float, document: int, other_score: float, other_document: int) -> bool:
    """Return whether an entry ranks below another: a lower score, or an equal score and a later document."""
    return score < other_score or (score == other_score and document > other_document)


@_compiled
def _replace_worst(scores: NDArray[np.float32], documents: NDArray[np.int32], score: float, document: int) -> None:
    """Replace the worst entry, on top of the heap, by a better one, and restore the heap."""
    n, hole, child = len(scores), 0, 1
    while child < n:
        right = child + 1
        if right < n and _worse(scores[right], documents[right], scores[child], documents[child]):
            child = right
        if not _worse(scores[child], documents[child], score, document):
            break
        scores[hole], documents[hole] = scores[child], documents[child]
        hole, child = child, 2 * child + 1
    scores[hole], documents[hole] = score, document


@_compiled
def top_k(
    words: NDArray[np.int32],
    starts: NDArray[np.int64],
    data: NDArray[np.float32],
    indices: NDArray[np.uint32],
    indptr: NDArray[np.int64],
    best_documents: NDArray[np.int32],
    best_scores: NDArray[np.float32],
    n_documents: int,
) -> None:
    """Fill in the best documents of each query, unordered; unused places keep their score of 0."""
    scores = np.zeros(n_documents + _BLOCK, np.float32)  # whole blocks; all 0 again after each query
    for query in range(len(starts) - 1):
        columns = words[starts[query] : starts[query + 1]]
        n_entries = 0
        for word in columns:
            among, weights = indices[indptr[word] : indptr[word + 1]], data[indptr[word] : indptr[word + 1]]
            n_entries += len(among)
            for entry in range(len(among)):
                scores[among[entry]] += weights[entry]
        heap_scores, heap = best_scores[query], best_documents[query]  # a heap from the start: all its scores are 0
        if _FEW * n_entries < n_documents:
            _among_touched(columns, indices, indptr, scores, heap_scores, heap)
        else:
            _among_all(scores, n_documents, heap_scores, heap)


@_compiled
def _among_touched(
    columns: NDArray[np.int32],
    indices: NDArray[np.uint32],
    indptr: NDArray[np.int64],
    scores: NDArray[np.float32],
    heap_scores: NDArray[np.float32],
    heap: NDArray[np.int32],
) -> None:
    """Keep the best of the documents with a word of the query, by a second walk along its words."""
    lowest, above_0 = heap_scores[0], np.float32(1e-45)
    for word in columns:
        among = indices[indptr[word] : indptr[word + 1]]
        for entry in range(len(among)):
            document = among[entry]
            score = scores[document]
            scores[document] = 0  # skipped at the next word that has this document too
            # one comparison, nearly always false: twice as fast as a branch on `score > 0` before it
            if score >= max(lowest, above_0) and _worse(lowest, heap[0], score, document):
                _replace_worst(heap_scores, heap, score, document)
                lowest = heap_scores[0]


@partial(_compiled, fastmath={"nnan", "nsz"})  # required for a vectorized maximum
def _among_all(
    scores: NDArray[np.float32], n_documents: int, heap_scores: NDArray[np.float32], heap: NDArray[np.int32]
) -> None:
    """Keep the best of all documents; a block without a score that is high enough is skipped."""
    lowest = heap_scores[0]
    for start in range(0, n_documents, _BLOCK):
        highest = np.float32(0)
        for i in range(start, start + _BLOCK):
            highest = max(highest, scores[i])
        if highest > lowest:
            for i in range(start, start + _BLOCK):
                if scores[i] > lowest:  # an equal score belongs to a later document, so it is worse
                    _replace_worst(heap_scores, heap, scores[i], i)
                    lowest = heap_scores[0]
    scores[:] = 0
