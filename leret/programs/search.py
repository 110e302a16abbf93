"""Program calls that leret records: searches, and calls of LMs other than the predictors' LMs.

Searches are made with `Search`, `search_tool` or ``dspy.settings.rm``. A repeated call is sent only
once per path.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from itertools import chain
from typing import Any, NamedTuple, Protocol

import dspy

from leret.core.aio import submit
from leret.core.dspy_internals import StandInLM, rm_rows, settings_here, watching_run
from leret.core.errors import LeretError, PolicyError, ProgramError, reason
from leret.core.types import Passage, Ranking, merge
from leret.retrieval.base import Retriever


class Observer(Protocol):
    """Answers searches and tool calls while leret runs a program.

    ``dspy.settings`` holds the observer.
    """

    def search(self, query: str, k: int, retriever: Retriever | None = None) -> Ranking: ...

    def call_tool(self, name: str, arguments: Any, ask: Callable[[], Any]) -> Any: ...

    def add(self, queries: tuple[str, ...], added: tuple[Ranking, ...]) -> None: ...


class SearchCall(NamedTuple):
    """One search after ``n_steps`` completions: the queries, and one ranking per query."""

    n_steps: int
    queries: tuple[str, ...]
    added: tuple[Ranking, ...]


@dataclass(frozen=True)
class Found:
    """Passages retrieved so far by a program.

    Attributes:
        searches: one ranking per search, in order.
    """

    searches: tuple[Ranking, ...] = ()

    @cached_property
    def ranking(self) -> Ranking:
        """All passages by descending retriever score, without duplicates.

        The other properties use the same order.
        """
        return merge(self.searches)

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
        """Retriever scores; higher is better."""
        return [passage.score for passage in self.ranking]

    @property
    def passages(self) -> list[str]:
        if not self.searches:  # as at the first step of most programs
            return []
        texts = []
        for passage in merge(self.searches):
            text = passage.text
            texts.append(f"{passage.title} | {text}" if passage.title else text)
        return texts


class Search(dspy.Module):
    """Retrieves passages for a query and adds them to the results of earlier searches.

    Args:
        k: passages per search.
        exclude_seen: whether to skip documents from earlier searches, so that each search adds
            ``k`` new passages.
        retriever: retriever to search; None uses ``dspy.settings.rm``, which leret sets while it
            runs the program.
        one_document: whether to return only passages with the best passage's title: the parts of
            one document.
        candidates: whether the passages are candidates for a `leret.Pick`; rewards and measures
            count only picked ones.
    """

    def __init__(
        self,
        k: int = 3,
        exclude_seen: bool = False,
        retriever: Retriever | None = None,
        one_document: bool = False,
        candidates: bool = False,
    ) -> None:
        super().__init__()
        self.k = k
        self.exclude_seen = exclude_seen
        self.retriever = retriever
        self.one_document = one_document
        self.candidates = candidates

    def forward(self, query: str | Sequence[str], results: Found | None = None) -> Found:
        """Search once per query and return all passages so far.

        A list of queries counts as one hop.
        """
        searches: tuple[Ranking, ...] = ()
        if results is not None:
            searches = results.searches
        n_before = len(searches)
        watching: Observer | None = settings_here().get("_leret_run") or watching_run()
        queries = (query,) if isinstance(query, str) else tuple(map(str, query))
        fields = vars(self)  # attribute lookup on DSPy modules is slow
        n = fields["k"]
        retriever = fields["retriever"]
        for text in queries:
            seen: set[str] = set()
            if fields["exclude_seen"]:
                seen = {passage.doc_id for passage in chain.from_iterable(searches)}
            k = n + len(seen)
            added = (
                self._retrieve(text, k) if watching is None else watching.search(text, k, retriever)
            )
            if seen or len(added) > n:
                unseen = [passage for passage in added if passage.doc_id not in seen]
                added = tuple(unseen[:n])
            if fields["one_document"]:
                added = _of_best_document(added)
            searches = (*searches, added)
        if watching is not None and queries and not fields["candidates"]:
            watching.add(queries, searches[n_before:])
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
        return type(self)(
            self.k, self.exclude_seen, self.retriever, self.one_document, self.candidates
        )


class QuickSearch(Search):
    """A search of a replayed program, without DSPy's slow bookkeeping."""

    __call__ = Search.forward


def _of_best_document(ranking: Ranking) -> Ranking:
    """Return the first passage and the passages with its title."""
    if not ranking:
        return ranking
    best = ranking[0]
    if not best.title:
        return (best,)
    return tuple([passage for passage in ranking if passage.title == best.title])


def search_tool(
    fn: Any = None, *, ids: Callable[[Any], str] | None = None, name: str | None = None
) -> Any:
    """Wrap a search function (sync or async), ``dspy.Tool`` or callable to record its results.

    Outside leret, the wrapper behaves like the callable and has its name, signature and docstring,
    so `dspy.ReAct` and `dspy.Tool` accept the wrapper. While leret runs a program, each query is
    sent once, even if the program is replayed, and rewards use the recorded results.

    Args:
        fn: callable that returns rows; if omitted, a decorator is returned.
        ids: function that maps a row to a document id; by default the id is ``doc_id``, ``pid``,
            ``id`` or ``title``, or the text up to `` | ``.
        name: tool name, for a callable without a name.
    """
    if fn is None:
        return partial(search_tool, ids=ids, name=name)
    if isinstance(fn, dspy.Tool):
        tool = copy.copy(fn)
        tool.func = search_tool(fn.func, ids=ids, name=name or fn.name)
        return tool
    target = fn if inspect.isroutine(fn) else type(fn).__call__.__get__(fn)
    label: str = name or str(getattr(fn, "__name__", type(fn).__name__))
    is_async = inspect.iscoroutinefunction(target)

    def watched(watching: Observer, args: Any, kwargs: Any) -> Any:
        def ask() -> Any:
            answer = fn(*args, **kwargs)
            return submit(answer).result() if is_async else answer

        rows = watching.call_tool(label, [args, kwargs], ask)
        query = " ".join(map(str, (*args, *kwargs.values())))
        watching.add((query,), (ranking_of(rows, ids),))
        return rows

    @wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        run = watching_run()
        if run is None:
            return fn(*args, **kwargs)
        return watched(run, args, kwargs)

    @wraps(target)
    async def acall(*args: Any, **kwargs: Any) -> Any:
        run = watching_run()
        if run is None:
            return await fn(*args, **kwargs)
        return watched(run, args, kwargs)

    wrapper = acall if is_async else call
    wrapper.__name__ = label
    return wrapper


def ranking_of(rows: Iterable[Any], ids: Callable[[Any], str] | None = None) -> Ranking:
    """Convert search rows to passages.

    Rows without a ``score`` get 1, 1/2, 1/3, ... by position.
    """
    passages = []
    for place, row in enumerate(rows, start=1):
        doc_id = ids(row) if ids is not None else _document_of(row)
        title = _get(row, "title") or ""
        text = row if isinstance(row, str) else ""
        text = _get(row, "long_text") or _get(row, "text") or text
        score = _get(row, "score")
        if not isinstance(score, int | float):
            score = 1.0 / place
        parent = _get(row, "parent")
        if parent is not None:
            parent = str(parent)
        passages.append(Passage(str(doc_id), str(title), str(text), float(score), parent))
    return tuple(passages)


def as_rm(query: str, k: int = 3, **kwargs: Any) -> list[dict[str, Any]]:
    """Answer a search by `dspy.Retrieve`.

    This function is ``dspy.settings.rm`` while leret runs a program.
    """
    watching: Observer | None = watching_run()
    if watching is None:
        raise ProgramError(
            "leret's dspy.settings.rm was called outside a leret run; call it in forward"
        )
    added = watching.search(query, k)
    watching.add((query,), (added,))
    return rm_rows(added)


def _document_of(row: Any) -> str:
    if isinstance(row, str):
        return row.split(" | ", 1)[0]
    for name in ("doc_id", "pid", "id", "title", "long_text", "text"):
        value = _get(row, name)
        if value is not None:
            return str(value).split(" | ", 1)[0]
    raise ProgramError(
        f"search_tool cannot read a document id from {row!r}; pass search_tool(fn, ids=...)"
    )


def _get(row: Any, name: str) -> Any:
    if hasattr(row, "get"):
        return row.get(name)
    if isinstance(row, str):  # its attributes are methods, such as `title`
        return None
    return getattr(row, name, None)


def recorded_lm(lm: dspy.BaseLM) -> dspy.BaseLM:
    """Return a copy of an LM that sends identical requests of a run only once."""
    kind: Any = type(lm)
    if isinstance(lm, StandInLM) or getattr(kind, "is_recorded", False):
        return lm

    class Recorded(kind):
        is_recorded = True

        def __call__(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
            request = partial(kind.__call__, self, prompt, messages=messages, **kwargs)
            run = watching_run()
            if run is None:
                return request()
            settings = {name: value for name, value in self.kwargs.items() if "key" not in name}
            ask = partial(copy_context().run, _ask, self.model, request)
            return run.call_tool(f"LM {self.model}", [settings, prompt, messages, kwargs], ask)

        async def acall(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
            return self(prompt, messages=messages, **kwargs)

    copied: dspy.BaseLM = lm.copy()
    copied.__class__ = Recorded
    return copied


def record_lms(program: dspy.Module) -> None:
    """Replace the LMs on a program's modules, except the predictors' LMs, with recorded copies."""
    for _, module in program.named_sub_modules():
        for name, value in list(vars(module).items()):
            if isinstance(module, dspy.Predict) and name == "lm":
                continue
            vars(module)[name] = _with_recorded(value)


def _with_recorded(value: Any) -> Any:
    if isinstance(value, dspy.BaseLM):
        return recorded_lm(value)
    if type(value) in (list, tuple) and any(isinstance(item, dspy.BaseLM) for item in value):
        return type(value)(map(_with_recorded, value))
    if type(value) is dict and any(isinstance(item, dspy.BaseLM) for item in value.values()):
        return {name: _with_recorded(item) for name, item in value.items()}
    return value


def _ask(model: str, request: Callable[[], Any]) -> Any:
    spend = dspy.settings.get("_leret_spend")
    if spend is not None:
        spend()
    try:
        with dspy.context(callbacks=[], _leret_run=None):
            return request()
    except LeretError:
        raise
    except Exception as error:
        raise PolicyError(f"{model}: {reason(error)}") from error
