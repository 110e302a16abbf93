"""Protocol of all retrievers, and helper functions for engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from leret.core.errors import LeretError, RetrievalError
from leret.core.types import Document, Ranking


@runtime_checkable
class Retriever(Protocol):
    """Search engine over one corpus. A search takes many queries at once.

    Optional attributes:

    - ``only_computes = True``: a search never waits for a disk, a network or a lock. Fast searches
      then run in the caller's thread.
    - ``names_its_index = False``: the digest may stay the same when the index changes. Rankings are
      then cached on disk only if the recipe asks for a cache.
    """

    @property
    def digest(self) -> str:
        """Digest of the engine, its settings and its corpus.

        The same digest means identical rankings.
        """

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """Rank documents for each query.

        Args:
            queries: any strings. An empty string gets an empty ranking.
            k: maximum number of documents per query, at least 1. May exceed the number of
                documents.

        Returns:
            One ranking per query, in the order of ``queries``: at most ``k`` passages, best score
            first.

        Raises:
            RetrievalError: the engine could not answer. A failure is never reported as an empty
                ranking.
        """


class CallableRetriever:
    """Mixin that makes a retriever callable, as ``dspy.settings.rm`` (used by `dspy.Retrieve`)."""

    def check(self) -> None:
        """Check that the retriever's server answers, if it has one."""

    def __call__(self: Retriever, query: str, k: int = 3, **kwargs: Any) -> list[Any]:
        """Search for one query. Inside a program run by leret, the search is recorded."""
        from leret.core.dspy_internals import rm_rows, watching_run

        run = watching_run()
        if run is None:
            return rm_rows(self.search([query], k)[0])
        ranking = run.search(query, k, self)
        run.add((query,), (ranking,))
        return rm_rows(ranking)


class NoRetriever:
    """Retriever of kind ``none``, for programs without searches.

    Every search raises RetrievalError.
    """

    only_computes = True
    digest = "none"

    def __init__(self, settings: object = None) -> None:
        pass

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        raise RetrievalError(
            f"retriever.kind is none, but the program searches for {queries[0]!r}; choose a kind"
        )


class PartialResultsError(RetrievalError):
    """Some queries of a batch failed.

    ``answered`` maps the queries that did not fail to their rankings.
    """

    def __init__(self, failure: LeretError, answered: Mapping[str, Ranking]) -> None:
        super().__init__(str(failure))
        self.exit_code = failure.exit_code
        self.answered = dict(answered)


class Documents(Protocol):
    """Ordered mapping from ids to documents, such as `leret.datasets.corpus.Corpus`."""

    digest: str
    """Digest of the documents and their order, like `leret.datasets.corpus.Corpus.digest`."""

    @property
    def parents(self) -> Mapping[str, str]:
        """The parent's id by chunk; empty if no document is a chunk."""

    def __getitem__(self, doc_id: str, /) -> Document: ...

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids in corpus order."""

    def __len__(self) -> int: ...


def has_terms(query: str) -> bool:
    """Return whether a query contains a letter or a digit.

    >>> has_terms("?! ..."), has_terms("a")
    (False, True)
    """
    return any(map(str.isalnum, query))


def to_valid_utf8(text: str) -> str:
    r"""Replace unpaired surrogates, which UTF-8 cannot encode, with the replacement character.

    >>> to_valid_utf8("a\ud800b") == "a\ufffdb"
    True
    """
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def clip_k(k: int, n_documents: int) -> int:
    """Limit ``k`` to the number of documents. Raise RetrievalError if ``k`` is less than 1."""
    if k < 1:
        raise RetrievalError(f"k is {k}; request at least one document")
    return min(k, n_documents)


def search_valid(
    queries: Sequence[str], search: Callable[[list[str]], Sequence[Ranking]]
) -> list[Ranking]:
    """Call ``search`` with the queries that have terms, as valid UTF-8.

    The other queries get an empty ranking.
    """
    queries_with_terms = [to_valid_utf8(query) for query in queries if has_terms(query)]
    answers = iter(search(queries_with_terms) if queries_with_terms else ())
    rankings: list[Ranking] = []
    for query in queries:
        rankings.append(next(answers) if has_terms(query) else ())
    return rankings
