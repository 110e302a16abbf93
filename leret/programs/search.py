"""The retriever as a DSPy module: what a program calls, and what leret watches."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import dspy

from leret.core.errors import ProgramError
from leret.core.types import Ranking, merge
from leret.retrieval.base import Retriever


class Observer(Protocol):
    """Stands in the retriever's place while leret runs a program; ``searches`` takes what each search added."""

    searches: list[Ranking]

    def search(self, query: str, k: int) -> Ranking:
        """The retriever's answer."""
        ...


observed: ContextVar[Observer | None] = ContextVar("leret_search_observer", default=None)
"""Set while leret runs a program; searches then go to the observer."""


@dataclass(frozen=True)
class Found:
    """What a program has retrieved so far.

    Attributes:
        searches: one ranking a search, in order, each as the search added it.
    """

    searches: tuple[Ranking, ...] = ()

    @property
    def ranking(self) -> Ranking:
        """The union of all searches by retriever score, no document twice; the other properties are in its order."""
        return merge(self.searches)

    @property
    def doc_ids(self) -> list[str]:
        """Ids of the documents."""
        return [passage.doc_id for passage in self.ranking]

    @property
    def titles(self) -> list[str]:
        """Their titles."""
        return [passage.title for passage in self.ranking]

    @property
    def texts(self) -> list[str]:
        """Their texts."""
        return [passage.text for passage in self.ranking]

    @property
    def scores(self) -> list[float]:
        """The retriever's scores; higher is better."""
        return [passage.score for passage in self.ranking]

    @property
    def passages(self) -> list[str]:
        """``title | text``: what goes into a prompt."""
        ranking = merge(self.searches) if self.searches else ()
        return [f"{p.title} | {p.text}" if p.title else p.text for p in ranking]


class Search(dspy.Module):
    """Retrieves passages for a query and adds them to what was found before.

    Args:
        k: passages a search.
        exclude_seen: skip what earlier searches found, so that a search always brings ``k`` new passages.
        retriever: where to search; None takes ``dspy.settings.rm``, which leret sets in its stages.
    """

    def __init__(self, k: int = 3, exclude_seen: bool = False, retriever: Retriever | None = None) -> None:
        super().__init__()
        self.k = k
        self.exclude_seen = exclude_seen
        self.retriever = retriever

    def __call__(self, query: str | Sequence[str], found: Found | None = None) -> Found:
        """As ``forward``; without DSPy's bookkeeping, which costs more than the rest, while leret runs the program."""
        if observed.get() is not None:
            return type(self).forward(self, query, found)
        answer: Found = super().__call__(query, found)
        return answer

    def forward(self, query: str | Sequence[str], found: Found | None = None) -> Found:
        """Search once a query and return what is found by now."""
        searches = found.searches if found is not None else ()
        observer = observed.get()
        for text in [query] if isinstance(query, str) else query:
            seen = {p.doc_id for ranking in searches for p in ranking} if self.exclude_seen else ()
            search = observer.search if observer is not None else self._retrieve
            added = search(str(text), self.k + len(seen))
            if seen or len(added) > self.k:
                added = tuple([p for p in added if p.doc_id not in seen])[: self.k]
            if observer is not None:
                observer.searches.append(added)
            searches = (*searches, added)
        return Found(searches)

    def _retrieve(self, query: str, k: int) -> Ranking:
        retriever = self.retriever or dspy.settings.rm
        if not isinstance(retriever, Retriever):
            raise ProgramError(
                "Search has no retriever: pass one as Search(retriever=...), or call dspy.configure(rm=...); "
                "leret.load(DIRECTORY) sets the one that a program was trained with"
            )
        return tuple(retriever.search([query], k)[0])

    def __deepcopy__(self, memo: dict[int, object]) -> Search:
        return Search(self.k, self.exclude_seen, self.retriever)
