"""The one protocol behind every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from leret.core.errors import RetrievalError
from leret.core.types import Document, Ranking


@runtime_checkable
class Retriever(Protocol):
    """Finds the documents of one corpus, for many queries at once.

    One whose searches wait for nothing but the processor, no disk, no network, no lock that is held for long, may say
    so by an attribute ``only_computes = True``: where such a search takes microseconds it is then called without a
    thread. One whose digest can stay the same when its index changes says so by ``names_its_index = False``: its
    answers are then kept on disk only where the recipe wishes it.
    """

    @property
    def digest(self) -> str:
        """Names the engine, its settings and its corpus; equal digests give equal rankings."""

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """Rank documents for each query.

        Args:
            queries: any strings, the empty one included (an empty ranking is its answer).
            k: documents a query, at least 1.

        Returns:
            One ranking a query, in the order of the queries, each of at most ``k`` passages.

        Raises:
            RetrievalError: the engine could not answer. Never an empty ranking instead.
        """
        ...


class PartlyAnsweredError(RetrievalError):
    """The engine could not answer some queries of a batch.

    Args:
        failure: of one of them.
        answered: the rankings of the others, by query.
    """

    def __init__(self, failure: RetrievalError, answered: Mapping[str, Ranking]) -> None:
        super().__init__(str(failure))
        self.exit_code = failure.exit_code
        self.answered = dict(answered)


def settled(queries: Sequence[str], outcomes: Sequence[Ranking | RetrievalError]) -> list[Ranking]:
    """The rankings of a batch, where there is one for each query.

    Args:
        queries: of the batch.
        outcomes: of each.

    Raises:
        PartlyAnsweredError: some failed; the first failure, with what is known of the others.
    """
    rankings = [outcome for outcome in outcomes if not isinstance(outcome, RetrievalError)]
    if len(rankings) == len(queries):
        return rankings
    pairs = list(zip(queries, outcomes, strict=True))
    failure = next(outcome for _, outcome in pairs if isinstance(outcome, RetrievalError))
    answered = {query: outcome for query, outcome in pairs if not isinstance(outcome, RetrievalError)}
    raise PartlyAnsweredError(failure, answered) from failure


class Documents(Protocol):
    """An ordered collection of documents by id; `leret.datasets.corpus.Corpus` is one."""

    @property
    def digest(self) -> str:
        """Names the content, order included; of an indexed corpus, as `leret.datasets.corpus.Corpus` computes it."""
        ...

    def __getitem__(self, doc_id: str, /) -> Document:
        """One document."""
        ...

    def __iter__(self) -> Iterator[str]:
        """Ids, in the order of the corpus."""
        ...

    def __len__(self) -> int:
        """How many documents there are."""
        ...


def speaks(query: str) -> bool:
    """Does a query hold anything to search for?

    >>> speaks("?! ..."), speaks("a")
    (False, True)
    """
    return any(map(str.isalnum, query))


def encodable(text: str) -> str:
    r"""Text that UTF-8 can hold: half a surrogate pair becomes a replacement character.

    >>> encodable("a\ud800b") == "a\ufffdb"
    True
    """
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def checked(k: int, n_documents: int) -> int:
    """How many documents an engine is asked for.

    Raises:
        RetrievalError: ``k`` is less than 1.
    """
    if k < 1:
        raise RetrievalError(f"k is {k}; ask for one document at least")
    return min(k, n_documents)


def answered(queries: Sequence[str], ask: Callable[[list[str]], Sequence[Ranking]]) -> list[Ranking]:
    """Rankings of all queries, where the engine is asked the ones that say something alone.

    Args:
        queries: any strings.
        ask: an engine's search: of text that can be encoded, one ranking a query.

    Returns:
        One ranking a query, in their order.
    """
    said = [query for query in queries if speaks(query)]
    found = iter(ask([encodable(query) for query in said]) if said else ())
    return [next(found) if speaks(query) else () for query in queries]
