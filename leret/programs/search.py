"""The retriever as a DSPy module: what a program calls, and what leret watches."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import dspy

from leret.core.errors import ProgramError
from leret.core.types import Passage, Ranking, merge
from leret.retrieval.base import Retriever


class Observer(Protocol):
    """Stands in the retriever's place while leret replays a program."""

    def search(self, query: str, k: int) -> Ranking:
        """The retriever's answer."""
        ...

    def record(self, ranking: Ranking) -> None:
        """Take note of what a search added."""
        ...


observed: ContextVar[Observer | None] = ContextVar("leret_search_observer", default=None)
"""Set while leret replays a program; searches then go to the observer."""


@dataclass(frozen=True)
class Found:
    """What a program has retrieved so far: every search in order, and their union.

    Attributes:
        searches: one ranking a search, each as the search added it.
    """

    searches: tuple[Ranking, ...] = ()

    @property
    def ranking(self) -> Ranking:
        """The union of all searches by retriever score, no document twice."""
        return merge(self.searches)

    @property
    def doc_ids(self) -> list[str]:
        """Ids of ``ranking``, best first."""
        return [passage.doc_id for passage in self.ranking]

    @property
    def titles(self) -> list[str]:
        """Titles of ``ranking``."""
        return [passage.title for passage in self.ranking]

    @property
    def texts(self) -> list[str]:
        """Texts of ``ranking``."""
        return [passage.text for passage in self.ranking]

    @property
    def scores(self) -> list[float]:
        """Retriever scores of ``ranking``; higher is better."""
        return [passage.score for passage in self.ranking]

    @property
    def passages(self) -> list[str]:
        """``title | text`` of ``ranking``: what goes into a prompt."""
        return [f"{p.title} | {p.text}" if p.title else p.text for p in self.ranking]


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

    def forward(self, query: str | Sequence[str], found: Found | None = None) -> Found:
        """Search once a query and return what is found by now.

        Args:
            query: one query, or several whose rankings are merged.
            found: what earlier searches of this program returned.

        Raises:
            ProgramError: no retriever is set.
            RetrievalError: the retriever cannot answer.
        """
        found = found or Found()
        for text in [query] if isinstance(query, str) else query:
            found = Found((*found.searches, self._one(str(text), found)))
        return found

    def _one(self, query: str, found: Found) -> Ranking:
        seen = {p.doc_id for ranking in found.searches for p in ranking} if self.exclude_seen else set()
        ranking: Sequence[Passage] = self._answer(query, self.k + len(seen))
        added = tuple(p for p in ranking if p.doc_id not in seen)[: self.k]
        observer = observed.get()
        if observer is not None:
            observer.record(added)
        return added

    def _answer(self, query: str, k: int) -> Ranking:
        observer = observed.get()
        if observer is not None:
            return observer.search(query, k)
        retriever = self.retriever or dspy.settings.rm
        if not isinstance(retriever, Retriever):
            raise ProgramError("Search has no retriever: pass one, or call dspy.configure(rm=leret.retriever(...))")
        return retriever.search([query], k)[0]

    def __deepcopy__(self, memo: dict[int, object]) -> Search:
        return Search(self.k, self.exclude_seen, self.retriever)
