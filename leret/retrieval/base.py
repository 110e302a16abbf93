"""The protocol of all engines, and functions that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from leret.core.errors import LeretError, RetrievalError
from leret.core.types import Document, Ranking


@runtime_checkable
class Retriever(Protocol):
    """Search of one corpus, for many queries at once.

    Optional attributes:

    - ``only_computes = True``: a search never waits for a disk, a network or a lock, so a quick one is called without
      a thread.
    - ``names_its_index = False``: the digest may stay the same when the index changes, so rankings are cached on disk
      only if the recipe asks for it.
    """

    @property
    def digest(self) -> str:
        """Digest of the engine, its settings and its corpus; equal digests give equal rankings."""

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """Rank documents for each query.

        Args:
            queries: any strings; an empty one has an empty ranking.
            k: documents per query, at least 1; may exceed the number of documents.

        Returns:
            One ranking per query, in their order: at most ``k`` passages, scores not increasing.

        Raises:
            RetrievalError: the engine could not answer; an empty ranking never stands for a failure.
        """


class CallableRetriever:
    """Mixin that makes a retriever usable as ``dspy.settings.rm``, which `dspy.Retrieve` calls."""

    def __call__(self: Retriever, query: str, k: int = 3, **kwargs: Any) -> list[Any]:
        """Search once; a program that leret runs records the search."""
        from leret.core.dspy_internals import rm_rows, watching_run

        run = watching_run()
        if run is None:
            return rm_rows(self.search([query], k)[0])
        ranking = run.search(query, k, self)
        run.add((query,), (ranking,))
        return rm_rows(ranking)


class NoRetriever:
    """Kind ``none``, for programs that do not search; a search is an error."""

    only_computes = True
    digest = "none"

    def __init__(self, settings: object = None) -> None:
        pass

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        raise RetrievalError(f"the program searches for {queries[0]!r} and retriever.kind is none; name an engine")


class PartialResultsError(RetrievalError):
    """Failure of some queries of a batch; ``answered`` has the rankings of the others, by query."""

    def __init__(self, failure: LeretError, answered: Mapping[str, Ranking]) -> None:
        super().__init__(str(failure))
        self.exit_code = failure.exit_code
        self.answered = dict(answered)


class Documents(Protocol):
    """An ordered collection of documents by id; `leret.datasets.corpus.Corpus` is one."""

    digest: str
    """Digest of the content and its order, computed as `leret.datasets.corpus.Corpus` does."""

    def __getitem__(self, doc_id: str, /) -> Document: ...

    def __iter__(self) -> Iterator[str]:
        """Return ids in the order of the corpus."""

    def __len__(self) -> int: ...


def has_terms(query: str) -> bool:
    """Return whether a query holds a letter or a digit.

    >>> has_terms("?! ..."), has_terms("a")
    (False, True)
    """
    return any(map(str.isalnum, query))


def to_valid_utf8(text: str) -> str:
    r"""Replace unpaired surrogates, which UTF-8 cannot encode, by the replacement character.

    >>> to_valid_utf8("a\ud800b") == "a\ufffdb"
    True
    """
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def clip_k(k: int, n_documents: int) -> int:
    """Limit ``k`` to the number of documents; RetrievalError if it is less than 1."""
    if k < 1:
        raise RetrievalError(f"k is {k}; ask for at least one document")
    return min(k, n_documents)


def search_valid(queries: Sequence[str], search: Callable[[list[str]], Sequence[Ranking]]) -> list[Ranking]:
    """Return rankings of all queries; ``search`` gets only those with terms, as valid UTF-8."""
    queries_with_terms = [to_valid_utf8(query) for query in queries if has_terms(query)]
    rankings = iter(search(queries_with_terms) if queries_with_terms else ())
    return [next(rankings) if has_terms(query) else () for query in queries]
