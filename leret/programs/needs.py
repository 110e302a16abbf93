"""What a running program needs next (a completion, a search or nothing), and how two runs differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import dspy
from pydantic_core import to_jsonable_python

from leret.core.dspy_internals import AdapterParseError, lm15
from leret.core.types import Choice, Ranking, json_encoder, merge
from leret.programs.prefill import AnswerAdapter
from leret.programs.search import SearchCall
from leret.retrieval.base import Retriever

PLAIN = (str, int, float, bool, type(None))

REPEATABLE = (
    "make the program depend only on its inputs, completions and searches (wrap searches with leret.search_tool), and "
    "do not set attributes in forward (caches, counters, demos, LMs)"
)

encode_sorted = json_encoder(sort_keys=True)
_SHOWN = 160  # maximum characters of a value in a message


@dataclass(eq=False)
class PredictorCall:
    """One LM call by a program.

    Attributes:
        predictor: name in ``program.named_predictors()``; in parentheses if ``forward`` creates the
            predictor.
        usual: True if the call uses the predictor's signature and demos, the run's adapter, and no
            extra settings.
        wording: instructions, if they differ from the predictor's.
        request: raw request, if the call bypassed the adapter; ``adapter`` and ``signature`` are
            None then.
        choice: candidates, if the call comes from a `leret.Pick`.
    """

    predictor: str
    inputs: Mapping[str, Any]
    usual: bool = False
    adapter: dspy.Adapter | None = None
    lm: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    signature: Any = None
    wording: str = ""
    demos: Sequence[Mapping[str, Any]] = ()
    request: lm15.Request | None = None
    choice: ClassVar[Choice | None] = None

    @cached_property
    def values(self) -> dict[str, Any]:
        fields = self.inputs if self.signature is None else self.signature.input_fields
        return {name: plain_json(value) for name, value in self.inputs.items() if name in fields}

    @cached_property
    def key(self) -> str:
        return encode_sorted((self.predictor, self.values, plain_json(self.config), self.wording))

    def asks_as(self, call: PredictorCall) -> bool:
        if self.predictor != call.predictor or self.wording != call.wording:
            return False
        if self.config != call.config:
            return False
        return self.inputs == call.inputs or self.key == call.key


@dataclass(frozen=True, slots=True)
class Step:
    """A completion for a call.

    ``outputs`` holds the parsed fields, or the AdapterParseError if parsing failed.
    """

    call: PredictorCall
    outputs: list[dict[str, Any]] | AdapterParseError
    text: str | None = None


@dataclass(frozen=True, slots=True)
class NeedsCompletion:
    """The program waits for the completion of ``call``; ``searches`` came before the call."""

    call: PredictorCall
    searches: tuple[SearchCall, ...]

    @property
    def predictor(self) -> str:
        return self.call.predictor

    @property
    def inputs(self) -> Mapping[str, Any]:
        return self.call.values

    @property
    def key(self) -> str:
        return self.call.key

    @property
    def choice(self) -> Choice | None:
        return self.call.choice

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end the completion."""
        adapter = self.call.adapter
        if not isinstance(adapter, AnswerAdapter):
            return ()
        return adapter.stop(self.call.signature)


@dataclass(frozen=True, slots=True)
class NeedsSearch:
    """The program waits for the result of a search.

    Attributes:
        key: key for the result in the search results.
        retriever: retriever to query; None means the run's retriever.
        ask: function that runs a search tool; None for other searches, which set ``query``, ``k``
            and ``retriever``.
    """

    key: Any
    query: str = ""
    k: int = 0
    retriever: Retriever | None = None
    ask: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The program returned ``prediction``, or raised its last completion's parse error."""

    prediction: Any
    searches: tuple[SearchCall, ...]

    @property
    def ranking(self) -> Ranking:
        return merge(_rankings(self.searches))

    @property
    def unparsed(self) -> bool:
        """True if the program did not handle the parse error of its last completion."""
        return isinstance(self.prediction, AdapterParseError)


Need = NeedsCompletion | NeedsSearch | Finished


def _rankings(searches: Iterable[SearchCall]) -> Iterator[Ranking]:
    return chain.from_iterable(search.added for search in searches)


def tool_key(name: str, arguments: Any) -> tuple[str, str]:
    """Return the key for a search tool's result."""
    return name, encode_sorted(plain_json(arguments))


def order(need: NeedsCompletion | NeedsSearch) -> tuple[Any, ...]:
    """Return a sort key: searches before calls, and parallel branches alike in every run."""
    if isinstance(need, NeedsSearch):
        return 0, "", repr(need.key)
    return 1, need.predictor, need.key


def plain_json(value: Any) -> Any:
    """Convert a value to JSON for comparison.

    Functions become their names, because addresses change between runs.
    """
    if type(value) in PLAIN:
        return value
    return to_jsonable_python(
        value, fallback=_name, inf_nan_mode="strings", serialize_unknown=False
    )


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def place(need: Need) -> Any:
    """Return the program's position: its request or prediction, and the documents so far."""
    if isinstance(need, NeedsSearch):
        return need.key
    documents = []
    for ranking in _rankings(need.searches):
        documents.append([passage.doc_id for passage in ranking])
    if isinstance(need, NeedsCompletion):
        return need.key, documents
    if isinstance(need.prediction, Exception):
        return repr(need.prediction), documents
    return encode_sorted(plain_json(_fields(need.prediction))), documents


def difference(before: Need, now: Need) -> str:
    """Describe how the next needs of two runs differ, quoting the value in each run."""
    if (
        not (isinstance(before, NeedsCompletion) and isinstance(now, NeedsCompletion))
        or before.predictor != now.predictor
    ):
        return f"one run reached {_shown(before)}, another {_shown(now)}"
    if before.key != now.key:
        return _changed(before.predictor, before.inputs, now.inputs)
    documents = place(before)[1]
    documents_now = place(now)[1]
    return (
        f"searches before {before.predictor} returned {documents} in one run, "
        f"{documents_now} in another"
    )


def asked_instead(step: Step, needs: Iterable[NeedsCompletion | NeedsSearch]) -> str:
    """Describe the call that a program made instead of a recorded step."""
    name = step.call.predictor
    values = step.call.values
    for need in needs:
        if isinstance(need, NeedsCompletion) and need.predictor == name:
            return _changed(name, values, need.inputs)
    return f"{name} was called with {_short(values)} in one run, and not called in another"


def _shown(need: Need) -> str:
    match need:
        case NeedsCompletion():
            return f"a call of {need.predictor} with {_short(need.inputs)}"
        case NeedsSearch():
            return f"a search for {_short(need.key)}"
        case Finished():
            return f"the end with prediction {_short(_fields(need.prediction))}"


def _changed(predictor: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    for name in {**before, **now}:
        value = before.get(name)
        value_now = now.get(name)
        if value != value_now:
            return (
                f"{predictor}.{name} was {_short(value)} in one run, "
                f"and {_short(value_now)} in another"
            )
    return f"{predictor} was called with the same inputs but different settings"


def _fields(prediction: Any) -> Any:
    if isinstance(prediction, dspy.Example):
        return dict(prediction.items())
    return prediction


def _short(value: Any) -> str:
    text = encode_sorted(plain_json(value))
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}..."
