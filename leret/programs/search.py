"""What a program searches with, and what leret watches: `Search`, `search_tool`, and ``dspy.settings.rm``."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import dspy

from leret.core.aio import submit
from leret.core.dspy_internals import carried_run, rm_rows, watching_run
from leret.core.errors import ProgramError
from leret.core.types import Passage, Ranking, merge
from leret.retrieval.base import Retriever


class Observer(Protocol):
    """Stands in the place of retrievers and tools while leret runs a program; ``dspy.settings`` carry it."""

    def search(self, query: str, k: int, retriever: Retriever | None = None) -> Ranking:
        """The retriever's answer."""
        ...

    def call_tool(self, name: str, arguments: Any, ask: Callable[[], Any]) -> Any:
        """The result of a search tool, which ``ask`` makes."""
        ...

    def add(self, queries: tuple[str, ...], added: tuple[Ranking, ...]) -> None:
        """Takes what one search brought, a ranking a query."""
        ...


class SearchCall(NamedTuple):
    """One search of a program.

    Attributes:
        n_steps: completions before it.
        queries: several where `Search` was called with a list.
        added: what each query brought.
    """

    n_steps: int
    queries: tuple[str, ...]
    added: tuple[Ranking, ...]


@dataclass(frozen=True)
class Found:
    """What a program has retrieved so far.

    Attributes:
        searches: one ranking a search, in order, each as the search added it.
        ranking: the union of all searches by retriever score, no document twice; the properties are in its order.
    """

    searches: tuple[Ranking, ...] = ()
    ranking: Ranking = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranking", merge(self.searches))

    @property
    def doc_ids(self) -> list[str]:
        return [passage.doc_id for passage in self.ranking]

    @property
    def titles(self) -> list[str]:
        return [passage.title for passage in self.ranking]

    @property
    def texts(self) -> list[str]:
        return [passage.text for passage in self.ranking]

    @property
    def scores(self) -> list[float]:
        """The retriever's scores; higher is better."""
        return [passage.score for passage in self.ranking]

    @property
    def passages(self) -> list[str]:
        """``title | text``: what goes into a prompt."""
        return [_shown(passage) for passage in self.ranking]


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
        if carried_run() is not None:
            return type(self).forward(self, query, found)
        answer: Found = super().__call__(query, found)
        return answer

    def forward(self, query: str | Sequence[str], found: Found | None = None) -> Found:
        """Search once a query and return what is found by now; a list of queries is one hop."""
        before = found.searches if found is not None else ()
        searches: tuple[Ranking, ...] = before
        watching: Observer | None = watching_run()
        queries = (query,) if isinstance(query, str) else tuple(map(str, query))
        own = vars(self)  # DSPy's modules look every attribute up by a method of their own
        n, exclude_seen, retriever = own["k"], own["exclude_seen"], own["retriever"]
        for text in queries:
            seen = {p.doc_id for ranking in searches for p in ranking} if exclude_seen else ()
            k = n + len(seen)
            added = self._retrieve(text, k) if watching is None else watching.search(text, k, retriever)
            if seen or len(added) > n:
                added = tuple([p for p in added if p.doc_id not in seen])[:n]
            searches = (*searches, added)
        if watching is not None and queries:
            watching.add(queries, searches[len(before) :])
        return Found(searches)

    def _retrieve(self, query: str, k: int) -> Ranking:
        retriever = self.retriever or dspy.settings.rm
        if not isinstance(retriever, Retriever):
            raise ProgramError(
                "Search has no retriever: pass one as Search(retriever=...), call dspy.configure(rm=...), or load the "
                "program with leret.load(DIRECTORY, retriever=...)"
            )
        return tuple(retriever.search([query], k)[0])

    def __deepcopy__(self, memo: dict[int, object]) -> Search:
        return Search(self.k, self.exclude_seen, self.retriever)


def search_tool(fn: Any = None, *, ids: Callable[[Any], str] | None = None, name: str | None = None) -> Any:
    """Wrap a search function, async or not, a ``dspy.Tool``, or any callable that returns rows, so that leret sees it.

    Outside of leret it is what it wraps, with its name, signature and documentation, so `dspy.ReAct` and `dspy.Tool`
    take it. While leret runs a program, results are recorded: a query is asked once, however often the program is
    replayed, and what was found is what rewards are computed from.

    Args:
        fn: the callable; without it, a decorator.
        ids: names the document of a row; by default its ``doc_id``, ``pid``, ``id`` or ``title``, or its text up to
            `` | ``.
        name: of the tool, where the callable has none of its own.
    """
    if fn is None:
        return functools.partial(search_tool, ids=ids, name=name)
    if isinstance(fn, dspy.Tool):
        tool = copy.copy(fn)
        tool.func = search_tool(fn.func, ids=ids, name=name or fn.name)
        return tool
    target = fn if inspect.isroutine(fn) else type(fn).__call__.__get__(fn)
    label: str = name or str(getattr(fn, "__name__", type(fn).__name__))
    is_async = inspect.iscoroutinefunction(target)

    def watched(watching: Observer, args: Any, kwargs: Any) -> Any:
        ask = (lambda: submit(fn(*args, **kwargs)).result()) if is_async else lambda: fn(*args, **kwargs)
        rows = watching.call_tool(label, [args, kwargs], ask)
        watching.add((" ".join(map(str, (*args, *kwargs.values()))),), (ranking_of(rows, ids),))
        return rows

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        run = watching_run()
        return fn(*args, **kwargs) if run is None else watched(run, args, kwargs)

    @functools.wraps(target)
    async def acall(*args: Any, **kwargs: Any) -> Any:
        run = watching_run()
        return await fn(*args, **kwargs) if run is None else watched(run, args, kwargs)

    made = acall if is_async else call
    made.__name__ = label
    return made


def ranking_of(rows: Iterable[Any], ids: Callable[[Any], str] | None = None) -> Ranking:
    """Rows of a search as passages; where they have no ``score``, the first place counts 1, the second 1/2, ..."""
    passages = []
    for place, row in enumerate(rows, start=1):
        doc_id = ids(row) if ids is not None else _document_of(row)
        score = _get(row, "score")
        title, text = _get(row, "title") or "", _get(row, "long_text") or _get(row, "text") or ""
        value = float(score) if isinstance(score, int | float) else 1.0 / place
        passages.append(Passage(str(doc_id), str(title), str(text or (row if isinstance(row, str) else "")), value))
    return tuple(passages)


def as_rm(query: str, k: int = 3, **kwargs: Any) -> list[dict[str, Any]]:
    """What ``dspy.settings.rm`` is while leret runs a program over a retriever of its own, for `dspy.Retrieve`."""
    watching: Observer | None = watching_run()
    if watching is None:
        raise ProgramError("no program is run by leret here")
    added = watching.search(query, k)
    watching.add((query,), (added,))
    return rm_rows(added)


def _shown(passage: Passage) -> str:
    return f"{passage.title} | {passage.text}" if passage.title else passage.text


def _document_of(row: Any) -> str:
    if isinstance(row, str):
        return row.split(" | ", 1)[0]
    for name in ("doc_id", "pid", "id", "title", "long_text", "text"):
        value = _get(row, name)
        if value is not None:
            return str(value).split(" | ", 1)[0]
    raise ProgramError(f"search_tool cannot name the document of {row!r}; pass search_tool(fn, ids=...)")


def _get(row: Any, name: str) -> Any:
    return row.get(name) if hasattr(row, "get") else getattr(row, name, None)
