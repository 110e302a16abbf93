"""The one protocol behind every engine, and what engines share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from leret.core.errors import LeretError, RetrievalError
from leret.core.types import Document, Ranking


@runtime_checkable
class Retriever(Protocol):
    """Finds the documents of one corpus, for many queries at once.

    One whose searches wait for nothing but the processor, no disk, no network, no lock that is held for long, may say
    so by an attribute ``only_computes = True``: where such a search takes microseconds it is then called without a
    thread. One whose digest can stay the same when its index changes says so by ``names_its_index = False``: its
    rankings are then cached on disk only where the recipe wishes it.
    """

    @property
    def digest(self) -> str:
        """Names the engine, its settings and its corpus; equal digests give equal rankings."""

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """Rank documents for each query.

        Args:
            queries: any strings, the empty one included (an empty ranking is its answer).
            k: documents a query, at least 1; may be more than there are.

        Returns:
            One ranking a query, in the order of the queries, each of at most ``k`` passages, scores not increasing.

        Raises:
            RetrievalError: the engine could not answer. Never an empty ranking instead.
        """


class CallableRetriever:
    """Lets a retriever be ``dspy.settings.rm``, which `dspy.Retrieve` calls."""

    def __call__(self: Retriever, query: str, k: int = 3, **kwargs: Any) -> list[Any]:
        """Search once; leret sees the search while it runs a program."""
        from leret.core.dspy_internals import rm_rows, watching_run

        run = watching_run()
        added = self.search([query], k)[0] if run is None else run.search(query, k, self)
        if run is not None:
            run.add((query,), (added,))
        return rm_rows(added)


class NoRetriever:
    """Kind ``none``: stands where a program searches nothing, and refuses a search."""

    only_computes = True
    digest = "none"

    def __init__(self, settings: object = None) -> None:
        pass

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        raise RetrievalError(f"the program searches for {queries[0]!r} and retriever.kind is none; name an engine")


class PartialResultsError(RetrievalError):
    """The engine could not answer some queries of a batch.

    Args:
        failure: of one of them.
        answered: the rankings of the others, by query.
    """

    def __init__(self, failure: LeretError, answered: Mapping[str, Ranking]) -> None:
        super().__init__(str(failure))
        self.exit_code = failure.exit_code
        self.answered = dict(answered)


class Documents(Protocol):
    """An ordered collection of documents by id; `leret.datasets.corpus.Corpus` is one."""

    digest: str
    """Names the content, order included; of an indexed corpus, as `leret.datasets.corpus.Corpus` computes it."""

    def __getitem__(self, doc_id: str, /) -> Document: ...

    def __iter__(self) -> Iterator[str]:
        """Ids, in the order of the corpus."""

    def __len__(self) -> int: ...


def has_terms(query: str) -> bool:
    """Does a query hold anything to search for?

    >>> has_terms("?! ..."), has_terms("a")
    (False, True)
    """
    return any(map(str.isalnum, query))


def to_valid_utf8(text: str) -> str:
    r"""Text that UTF-8 can hold: half a surrogate pair becomes a replacement character.

    >>> to_valid_utf8("a\ud800b") == "a\ufffdb"
    True
    """
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def clip_k(k: int, n_documents: int) -> int:
    """``k``, at most the number of documents.

    Raises:
        RetrievalError: ``k`` is less than 1.
    """
    if k < 1:
        raise RetrievalError(f"k is {k}; ask for one document at least")
    return min(k, n_documents)


def search_valid(queries: Sequence[str], search: Callable[[list[str]], Sequence[Ranking]]) -> list[Ranking]:
    """Rankings of all queries; an engine's ``search`` gets valid UTF-8, and only the queries that have terms."""
    asked = [to_valid_utf8(query) for query in queries if has_terms(query)]
    found = iter(search(asked) if asked else ())
    return [next(found) if has_terms(query) else () for query in queries]
