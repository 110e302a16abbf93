"""Requests of a program on its way (LM calls, searches, or nothing more), and the differences of two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import dspy
from pydantic_core import to_jsonable_python

from leret.core.dspy_internals import AdapterParseError, lm15
from leret.core.types import Choice, Ranking, json_encoder, merge
from leret.programs.search import SearchCall
from leret.retrieval.base import Retriever

PLAIN = (str, int, float, bool, type(None))

REPEATABLE = (
    "let it depend on its inputs, completions and searches alone (wrap a search with leret.search_tool), and keep "
    "nothing on itself: no cache, counter, demo or LM that forward sets"
)

encode_sorted = json_encoder(sort_keys=True)
_SHOWN = 160  # characters of a value in a message


@dataclass(eq=False)
class PredictorCall:
    """One call of an LM, as the program makes it.

    Attributes:
        predictor: name in ``program.named_predictors()``; in parentheses if the program makes the predictor on the way.
        usual: the predictor's own signature and demos under the run's adapter, without settings for this call.
        wording: instructions other than the predictor's.
        request: a call that bypassed the adapter, and so has no adapter and signature here.
        choice: candidates, for a call of a `leret.Pick`.
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

    def asks_as(self, other: PredictorCall) -> bool:
        same = self.predictor == other.predictor and self.wording == other.wording and self.config == other.config
        return same and (self.inputs == other.inputs or self.key == other.key)


@dataclass(frozen=True, slots=True)
class Step:
    """A completion as the program sees it: its ``outputs`` fields; an AdapterParseError if it does not parse."""

    call: PredictorCall
    outputs: list[dict[str, Any]] | AdapterParseError
    text: str | None = None


@dataclass(frozen=True, slots=True)
class NeedsCompletion:
    """The program stands at a call that has no completion yet, after some searches."""

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


@dataclass(frozen=True, slots=True)
class NeedsSearch:
    """The program stands at a search that has no answer yet.

    Attributes:
        key: key of the answer in the results.
        retriever: retriever of the query; None: the run's.
        ask: makes the answer if the search is a tool; the other fields are empty then.
    """

    key: Any
    query: str = ""
    k: int = 0
    retriever: Retriever | None = None
    ask: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The program returned ``prediction``, or ended in the AdapterParseError of its last completion."""

    prediction: Any
    searches: tuple[SearchCall, ...]

    @property
    def ranking(self) -> Ranking:
        return merge(added for search in self.searches for added in search.added)

    @property
    def unparsed(self) -> bool:
        """True if the program ended in an unparsed completion that it does not handle."""
        return isinstance(self.prediction, AdapterParseError)


Need = NeedsCompletion | NeedsSearch | Finished


def tool_key(name: str, arguments: Any) -> tuple[str, str]:
    """Return the key of a search tool's result."""
    return name, encode_sorted(plain_json(arguments))


def order(need: NeedsCompletion | NeedsSearch) -> tuple[Any, ...]:
    """Return a sort key by which the same one of parallel branches always continues: searches first, then calls."""
    if isinstance(need, NeedsSearch):
        return 0, "", repr(need.key)
    return 1, need.predictor, need.key


def plain_json(value: Any) -> Any:
    """Return a JSON value that names a question; functions become their names, since addresses change."""
    if type(value) in PLAIN:
        return value
    return to_jsonable_python(value, fallback=_name, inf_nan_mode="strings", serialize_unknown=False)


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def place(need: Need) -> Any:
    """Return a key of a place: the question asked or the prediction, with the documents found before it."""
    if isinstance(need, NeedsSearch):
        return need.key
    documents = [[passage.doc_id for passage in added] for search in need.searches for added in search.added]
    if isinstance(need, NeedsCompletion):
        return need.key, documents
    value = need.prediction
    return repr(value) if isinstance(value, Exception) else encode_sorted(plain_json(_fields(value))), documents


def difference(before: Need, now: Need) -> str:
    """Describe the difference between two places that should be one, with both values."""
    if isinstance(before, NeedsCompletion) and isinstance(now, NeedsCompletion) and before.predictor == now.predictor:
        if before.key != now.key:
            return _changed(before.predictor, before.inputs, now.inputs)
        return f"the searches before {before.predictor} found {place(before)[1]} and then {place(now)[1]}"
    return f"it came to {_shown(before)} and then to {_shown(now)}"


def asked_instead(step: Step, needs: Iterable[NeedsCompletion | NeedsSearch]) -> str:
    """Describe the call that a program makes in place of a step of its path."""
    name = step.call.predictor
    now = next((need.inputs for need in needs if isinstance(need, NeedsCompletion) and need.predictor == name), None)
    if now is None:
        return f"{name} was asked for {_short(step.call.values)}, and is no longer on the same path"
    return _changed(name, step.call.values, now)


def _shown(need: Need) -> str:
    match need:
        case NeedsCompletion():
            return f"a call of {need.predictor} for {_short(need.inputs)}"
        case NeedsSearch():
            return f"a search for {_short(need.key)}"
        case Finished():
            return f"its end with {_short(_fields(need.prediction))}"


def _changed(predictor: str, before: Any, now: Any) -> str:
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return f"{predictor} was asked {_short(before)}, and on the same path {_short(now)}"
    name = next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)
    if name is None:
        return f"{predictor} was called in other ways with the same inputs"
    return f"{predictor}.{name} was {_short(before.get(name))}, and on the same path {_short(now.get(name))}"


def _fields(prediction: Any) -> Any:
    return dict(prediction.items()) if isinstance(prediction, dspy.Example) else prediction


def _short(value: Any) -> str:
    text = encode_sorted(plain_json(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
